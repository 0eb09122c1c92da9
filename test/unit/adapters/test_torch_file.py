"""`adapter_model.bin`: tensors come out as from safetensors, and nothing in it ever runs (C73)."""

import contextlib
import io
import os
import pickle
import re
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers_peft as hp
import pytest
import torch

import sglang_graft
from sglang_graft.adapters import AdapterError, read_adapter
from sglang_graft.adapters.torch_file import BIN_NAME

Q0 = hp.key(0, "self_attn.q_proj", "A")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter whose weights are in a `.bin` file only."""
    hp.save_adapter(tmp_path, r=8)
    torch.save(hp.load_file(tmp_path / hp.WEIGHTS), tmp_path / BIN_NAME)
    (tmp_path / hp.WEIGHTS).unlink()
    return tmp_path


def refusal(folder: Path) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, hp.tiny_spec())
    assert caught.value.file == folder / BIN_NAME
    return caught.value


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Save again what `change` makes of the tensors in the `.bin` file."""
    tensors = torch.load(folder / BIN_NAME, weights_only=True)
    changed = change(tensors)
    torch.save(tensors if changed is None else changed, folder / BIN_NAME)


class Marker:
    """Unpickled without restriction, it makes an empty folder."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.file,)


def old_format(value: Any, file: Path) -> None:
    torch.save(value, file, _use_new_zipfile_serialization=False)


def bare_pickle(value: Any, file: Path) -> None:
    file.write_bytes(pickle.dumps(value))


WRITERS = {"archive": torch.save, "old format": old_format, "bare pickle": bare_pickle}


@pytest.mark.parametrize("place", ["alone", "value", "key"])
@pytest.mark.parametrize("write", WRITERS)
def test_C73_a_pickle_never_runs(write: str, place: str, folder: Path, monkeypatch) -> None:
    marker = folder / "marker"
    evil = Marker(marker)
    content = {"alone": evil, "value": {Q0: evil}, "key": {evil: torch.ones(1)}}[place]
    WRITERS[write](content, folder / BIN_NAME)
    # The trap works: an ordinary reader falls into it.
    with contextlib.suppress(RuntimeError, TypeError):  # what is left over is no checkpoint
        torch.load(folder / BIN_NAME, weights_only=False)
    assert marker.exists()
    marker.rmdir()
    # Not even with torch's switch that gives up the protection.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    reason = refusal(folder).reason
    assert not marker.exists()
    if write == "archive":
        assert "refused by weights-only loading: it names" in reason
    else:
        assert "is not an archive of torch.save" in reason


@pytest.mark.parametrize("name", [BIN_NAME, "training_args.bin", "optimizer.pt", "x.pkl"])
def test_C73_other_pickles_are_not_opened(name: str, tmp_path: Path) -> None:
    hp.save_adapter(tmp_path)
    torch.save(Marker(tmp_path / "marker"), tmp_path / name)
    assert read_adapter(tmp_path, hp.tiny_spec()).deltas
    assert not (tmp_path / "marker").exists()


def test_C73_a_pickle_under_the_other_name(folder: Path) -> None:
    torch.save(Marker(folder / "marker"), folder / hp.WEIGHTS)
    with pytest.raises(AdapterError, match="is not a readable safetensors file"):
        read_adapter(folder, hp.tiny_spec())
    assert not (folder / "marker").exists()


def test_C73_one_restricted_load_and_no_pickle_in_the_sources() -> None:
    root = Path(sglang_graft.__file__).parent
    loads, pickles = [], []
    for path in root.rglob("*.py"):
        text = path.read_text()
        loads += re.findall(r"torch\.load\(.*", text)
        pickles += re.findall(r"(?:import|from) (?:pickle|dill|joblib|shelve|marshal)\b", text)
    assert loads == ['torch.load(stream, weights_only=True, map_location="cpu")']
    assert pickles == []


def test_same_identity_as_safetensors(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("other"))
    hp.save_file(torch.load(folder / BIN_NAME, weights_only=True), other / hp.WEIGHTS)
    spec = hp.tiny_spec(torch.bfloat16)
    assert read_adapter(folder, spec).identity == read_adapter(other, spec).identity


def test_views_and_gradients_are_read_as_numbers(folder: Path) -> None:
    wanted = read_adapter(folder, hp.tiny_spec()).identity

    def disguise(tensors: dict[str, Any]) -> OrderedDict[str, torch.Tensor]:
        tensors[Q0] = tensors[Q0].t().contiguous().t().requires_grad_()
        other = next(name for name in tensors if name != Q0)
        tensors[other] = torch._neg_view(-tensors[other])
        assert tensors[other].is_neg()
        return OrderedDict(tensors)

    rewrite(folder, disguise)
    assert read_adapter(folder, hp.tiny_spec()).identity == wanted


def with_attribute(tensors: dict[str, Any]) -> None:
    tensors[Q0].copy_to = 1


def set_q0(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({Q0: value})


CONTENTS = {
    "list": (lambda tensors: list(tensors.values()), "wanted a dict of tensors, got list"),
    "tensor": (lambda tensors: tensors[Q0], "wanted a dict of tensors, got Tensor"),
    "number": (set_q0(3), "wanted a plain tensor, got int"),
    "nested": (set_q0({"a": torch.ones(1)}), "wanted a plain tensor, got dict"),
    "parameter": (set_q0(torch.nn.Parameter(torch.ones(8, 64))), "got Parameter"),
    "sparse": (set_q0(torch.ones(8, 64).to_sparse()), "wanted a dense tensor"),
    "meta": (set_q0(torch.ones(8, 64, device="meta")), "wanted a dense tensor"),
    "key": (lambda tensors: {**tensors, 1: torch.ones(1)}, "wanted a name, got int"),
    "attribute": (with_attribute, "carries attributes: ['copy_to']"),
    "expanded": (set_q0(torch.ones(1).expand(8, 64)), "wanted 2048 bytes for shape [8, 64], got 4"),
    "shape": (set_q0(torch.ones(8, 32)), "wanted shape [8, 64] for this base model, got [8, 32]"),
    "dtype": (set_q0(torch.ones(8, 64, dtype=torch.int8)), "got torch.int8"),
    "nan": (set_q0(torch.full((8, 64), float("nan"))), "holds NaN or infinite numbers"),
    "empty": (set_q0(torch.ones(0)), "is empty, shape [0]"),
}


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
@pytest.mark.parametrize("content", CONTENTS)
def test_anything_but_plain_tensors_is_refused(content: str, folder: Path) -> None:
    change, reason = CONTENTS[content]
    rewrite(folder, change)
    assert reason in refusal(folder).reason


def test_one_block_of_numbers_under_many_names(folder: Path) -> None:
    block = torch.ones(1 << 16)
    torch.save({f"t{i}": block[:] for i in range(100)}, folder / BIN_NAME)
    assert "bytes of tensors, got 26214400" in refusal(folder).reason


def repack(folder: Path, method: int, cut: int | None = None) -> None:
    source = zipfile.ZipFile(io.BytesIO((folder / BIN_NAME).read_bytes()))
    with zipfile.ZipFile(folder / BIN_NAME, "w", method) as target:
        for entry in source.infolist():
            data = source.read(entry)
            target.writestr(entry.filename, data[:cut] if "/data/" in entry.filename else data)


def test_a_compressed_archive_is_refused(folder: Path) -> None:
    repack(folder, zipfile.ZIP_DEFLATED)
    assert refusal(folder).reason == "is compressed; torch.save never does"


def test_an_encrypted_archive_is_refused(folder: Path) -> None:
    content = bytearray((folder / BIN_NAME).read_bytes())
    for mark, flags in ((b"PK\1\2", 8), (b"PK\3\4", 6)):
        for found in re.finditer(re.escape(mark), content):
            content[found.start() + flags] |= 1
    (folder / BIN_NAME).write_bytes(content)
    assert "is encrypted" in refusal(folder).reason


def test_numbers_cut_short(folder: Path) -> None:
    repack(folder, zipfile.ZIP_STORED, cut=8)
    assert "it is damaged or holds more than tensors" in refusal(folder).reason
    content = (folder / BIN_NAME).read_bytes()
    (folder / BIN_NAME).write_bytes(content[: len(content) // 2])
    assert "is not an archive of torch.save" in refusal(folder).reason


def test_a_few_bytes_that_take_years_to_hash(folder: Path) -> None:
    name: Any = ()
    for _ in range(60):
        name = (name, name)
    # A dict would hash it here and now.
    torch.save([name], folder / BIN_NAME)
    assert refusal(folder).reason == "its pickle uses a value twice (a shared tensor?)"


def test_a_huge_pickle(folder: Path) -> None:
    rewrite(folder, lambda tensors: {**tensors, "x" * 17 * 2**20: torch.ones(1)})
    assert refusal(folder).reason.startswith("wanted at most 16777216 bytes, got ")
