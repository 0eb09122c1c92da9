"""DoRA, lora_bias and every scale rule in one batch: PEFT's tokens and log-probabilities.

Once over a Llama, and once over a Qwen2 with biases on q, k and v and a tied head.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_adapters
import tiny_model
import torch
from harness import Request, Server, serve
from reference import Reference, check, check_logprobs

pytestmark = pytest.mark.server

ALL = list(tiny_adapters.ALL)
MLP = ["gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ALL},
    "alphas": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ALL,
        "rank_pattern": {"down_proj": 12},
        "alpha_pattern": {"v_proj": 20, r"layers\.[02]\.mlp\..*": 3},
    },
    "dora": {"r": 8, "lora_alpha": 16, "use_dora": True, "target_modules": ALL},
    "dora-qkv": {
        "r": 5,
        "lora_alpha": 12,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "alpha_pattern": {"k_proj": 30},
    },
    "dora-mlp": {"r": 3, "lora_alpha": 3, "use_dora": True, "target_modules": MLP},
    "bias": {"r": 6, "lora_alpha": 9, "lora_bias": True, "target_modules": ALL},
    "bias-qv": {
        "r": 2,
        "lora_alpha": 7,
        "lora_bias": True,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj"],
    },
}
NAMES = (None, *KINDS)
PROMPTS = [tiny_model.prompt(length, seed=length) for length in (5, 37, 130)]
IN_FLIGHT = 24
BAD_REQUEST = 400


@dataclass(frozen=True)
class Running:
    """A server over one base model, and the truth about it."""

    server: Server
    reference: Reference
    folders: dict[str, Path]
    base: Callable[[], torch.nn.Module]


BASES = {"llama": tiny_model.new_model, "qwen2": tiny_model.new_biased_model}


@pytest.fixture(scope="module", params=BASES)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    new = BASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_model.save_model(folder / "base", new)
    folders = {
        name: tiny_adapters.save(folder / name, lora, seed=300 + number, base=new)
        for number, (name, lora) in enumerate(KINDS.items())
    }
    torch.set_num_threads(1)  # the server runs beside us
    reference = Reference(new(), folders)
    tokenizer = tiny_model.save_tokenizer(folder / "tokenizer")
    flags = ("--max-total-tokens", "16384", "--tokenizer-path", str(tokenizer))
    with serve(model, folder, *flags, adapters=folders, env={"GRAFT_CHECK": "1"}) as server:
        yield Running(server, reference, folders, new)


def requests(*, logprobs: bool) -> list[Request]:
    """Every adapter and the base model on every prompt, in an order that mixes them."""
    found = [Request(name, prompt, logprobs=logprobs) for name in NAMES for prompt in PROMPTS]
    random.Random(5).shuffle(found)
    return found


def test_every_adapter_changes_the_answer(running: Running) -> None:
    for prompt in PROMPTS:
        answers = {tuple(running.reference.answer(name, prompt, 16).tokens) for name in NAMES}
        assert len(answers) == len(NAMES)


def test_C01_a_mixed_batch_has_the_tokens_of_peft(running: Running) -> None:
    running.server.flush()
    batch = requests(logprobs=False)
    for _ in range(2):  # cold, and on prefix hits
        check(running.reference, batch, running.server.ask_all(batch, IN_FLIGHT))


def test_C01_a_mixed_batch_has_the_log_probabilities_of_peft(running: Running) -> None:
    running.server.flush()
    batch = requests(logprobs=True)
    answers = running.server.ask_all(batch, IN_FLIGHT)
    check(running.reference, batch, answers)
    largest = check_logprobs(running.reference, batch, answers)
    print(f"largest difference of a log-probability: {largest:.2g}")


def test_one_http_batch_with_all_of_them(running: Running) -> None:
    batch = [Request(name, PROMPTS[1], logprobs=True) for name in NAMES]
    answers = running.server.ask_batch(batch)
    check(running.reference, batch, answers)
    check_logprobs(running.reference, batch, answers)


def test_the_base_model_is_the_same_beside_and_without_vectors(running: Running) -> None:
    prompt = PROMPTS[2]
    running.server.flush()
    alone = running.server.ask(Request(None, prompt, logprobs=True))
    running.server.flush()
    batch = [Request(name, prompt, logprobs=True) for name in NAMES]
    beside = running.server.ask_all(batch, IN_FLIGHT)[0]
    assert beside["output_ids"] == alone["output_ids"]
    check_logprobs(running.reference, batch[:1], [beside])


def without(folder: Path, part: str) -> Path:
    """Take the tensors out whose names have `part` in them."""
    tensors = tiny_adapters.load_file(folder / tiny_adapters.WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if part not in name}
    assert len(kept) < len(tensors)
    tiny_adapters.save_file(kept, folder / tiny_adapters.WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("kind", "part", "reason"),
    [
        (
            "dora",
            "layers.1.self_attn.q_proj.lora_magnitude",
            "its lora_magnitude_vector is missing",
        ),
        ("bias", "layers.2.mlp.up_proj.lora_B.bias", "its lora_B.bias is missing"),
    ],
)
def test_a_part_of_the_vectors_is_refused(
    running: Running, tmp_path: Path, kind: str, part: str, reason: str
) -> None:
    folder = tiny_adapters.save(tmp_path, KINDS[kind], seed=1, base=running.base)
    response = running.server.load("partial", without(folder, part))
    assert response.status_code == BAD_REQUEST
    assert reason in response.text
    batch = [Request(name, PROMPTS[0]) for name in NAMES]
    check(running.reference, batch, running.server.ask_all(batch, IN_FLIGHT))


def test_unloaded_and_loaded_again(running: Running) -> None:
    batch = [Request("dora", prompt, logprobs=True) for prompt in PROMPTS]
    assert running.server.unload("dora").status_code == 200
    loaded = running.server.load("dora", running.folders["dora"])
    assert loaded.status_code == 200, loaded.text
    answers = running.server.ask_all(batch, IN_FLIGHT)
    check(running.reference, batch, answers)
    check_logprobs(running.reference, batch, answers)


def test_C19_wrapped_names_answer_alike(running: Running, tmp_path: Path) -> None:
    folder = tiny_adapters.save(tmp_path, KINDS["dora"], seed=303, base=running.base)
    tensors = tiny_adapters.load_file(folder / tiny_adapters.WEIGHTS)
    renamed = {
        n.replace("model.layers", "model.language_model.layers"): t for n, t in tensors.items()
    }
    tiny_adapters.save_file(renamed, folder / tiny_adapters.WEIGHTS)
    loaded = running.server.load("wrapped", folder)
    assert loaded.status_code == 200, loaded.text
    answer = running.server.ask(Request("wrapped", PROMPTS[2]))
    check(running.reference, [Request("dora", PROMPTS[2])], [answer])
    # Seed 303 is that of "dora": equal weights are one identity, and share their KV.
    assert answer["meta_info"]["cached_tokens"] > 0
