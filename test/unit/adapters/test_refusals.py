"""Every adapter that cannot be applied exactly is refused, with the reason."""

import os
from pathlib import Path
from typing import Any

import helpers_peft as hp
import pytest
import torch
from safetensors.torch import save_file

from sglang_graft.adapters import AdapterError, read_adapter

Q0 = hp.key(0, "self_attn.q_proj", "A")
Q0_B = hp.key(0, "self_attn.q_proj", "B")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hp.save_adapter(tmp_path, r=8)
    return tmp_path


def refusal(folder: Path) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, hp.tiny_spec())
    return caught.value


CONFIG_CASES: list[tuple[str, Any, str]] = [
    ("peft_type", None, "wanted 'LORA', got None"),
    ("init_lora_weights", "unheard", "not an initialisation that we know"),
    ("r", 0, "wanted an integer of at least 1, got 0"),
    ("r", 8.0, "wanted an integer of at least 1, got 8.0"),
    ("r", True, "wanted an integer"),
    ("lora_alpha", "16", "wanted a number, got '16'"),
    ("lora_alpha", True, "wanted a number"),
    ("lora_alpha", float("nan"), "wanted a finite float32, got nan"),
    ("lora_alpha", 10**400, "wanted a finite float32"),
    ("use_rslora", "yes", "wanted true or false"),
    ("rank_pattern", ["q_proj"], "wanted an object"),
    ("target_modules", [1], "wanted a string or a list of strings"),
    ("layers_to_transform", ["1"], "wanted an integer or a list of integers"),
]


@pytest.mark.parametrize(("name", "value", "reason"), CONFIG_CASES)
def test_config_key(name: str, value: Any, reason: str, folder: Path) -> None:
    hp.edit_config(folder, **{name: value})
    error = refusal(folder)
    assert (error.file, error.item) == (folder / hp.CONFIG, name)
    assert reason in error.reason
    assert str(error) == f"{error.file}: {name}: {error.reason}"


@pytest.mark.parametrize(
    ("name", "value", "item"),
    [
        ("rank_pattern", {"q_proj": "4"}, "rank_pattern['q_proj']"),
        ("alpha_pattern", {"q_proj": None}, "alpha_pattern['q_proj']"),
        ("alpha_pattern", {"q_proj(": 4}, "alpha_pattern['q_proj(']"),
        ("target_modules", "q_proj(", "target_modules"),
    ],
)
def test_pattern_values(name: str, value: Any, item: str, folder: Path) -> None:
    hp.edit_config(folder, **{name: value})
    assert refusal(folder).item == item


@pytest.mark.parametrize(
    "changes",
    [
        {"eva_config": {"rho": 2.0}, "init_lora_weights": "eva"},
        {"corda_config": {"corda_method": "ipm"}, "init_lora_weights": True},
        {"loftq_config": {"loftq_bits": 4}},
        {"use_something_of_2030": False},
        {"something_else": None},
        {"ensure_weight_tying": True},
        {"modules_to_save": []},
    ],
)
def test_harmless_config_keys(changes: dict[str, Any], folder: Path) -> None:
    wanted = read_adapter(folder, hp.tiny_spec()).identity
    hp.edit_config(folder, **changes)
    assert read_adapter(folder, hp.tiny_spec()).identity == wanted


LAYERS = "base_model.model.model.layers"
EXTRA_TENSORS = [
    (f"{LAYERS}.0.self_attn.q_proj.bias", "bias"),
    (f"{LAYERS}.0.mlp.experts.lora_A.weight", "experts"),
    (f"{LAYERS}.0.self_attn.q_proj.base_layer.weight", "needs the weights of the base model"),
    (f"{LAYERS}.0.self_attn.x_proj.base_layer.weight", "do not belong in an adapter"),
    ("base_model.model.layers.0.mlp.up_proj.lora_A.weight", "has another path to its layers"),
    (f"base_model.model.{LAYERS}.0.mlp.up_proj.lora_A.weight", "has another path to its layers"),
    (f"{LAYERS}.0.self_attn.q_proj.lora_A.bias", "bias tensors are not supported"),
    (f"{LAYERS}.00.mlp.up_proj.lora_A.weight", "wanted model.layers.<layer>"),
    (f"{LAYERS}.{'9' * 5000}.mlp.up_proj.lora_A.weight", "wanted model.layers.<layer>"),
    (f"{LAYERS}.0.self_attn.up_proj.lora_A.weight", "mlp.up_proj"),
    (f"{LAYERS}.2.mlp.up_proj.lora_A.weight", "wanted a layer below 2, got layer 2"),
    (f"{LAYERS}.1.mlp.up_proj.lora_A.weight", "its lora_B partner is missing"),
    (f"{LAYERS}.1.mlp.up_proj.lora_B.weight", "its lora_A partner is missing"),
    (f"{LAYERS}.0.self_attn.q_proj.lora_A.other.weight", "names another adapter than"),
    ("model.layers.0.self_attn.q_proj.lora_A.weight", "is the same matrix as"),
    ("step", "wanted model.layers.<layer>"),
]


@pytest.mark.parametrize(("name", "reason"), EXTRA_TENSORS, ids=range(len(EXTRA_TENSORS)))
def test_a_tensor_that_fits_nowhere(name: str, reason: str, folder: Path) -> None:
    hp.edit_tensors(folder, lambda tensors: tensors | {name: torch.ones(8, 64)})
    error = refusal(folder)
    assert error.file == folder / hp.WEIGHTS
    # Which of the two that contradict each other is named depends on their order only.
    assert name in (error.item, error.reason.rpartition(" ")[2]) or "another adapter" in reason
    assert reason in error.reason


TENSOR_VALUES = [
    (Q0, torch.ones(8, 128), "wanted shape [8, 64] for this base model, got [8, 128]"),
    (Q0_B, torch.ones(128, 8), "wanted shape [64, 8] for this base model, got [128, 8]"),
    (Q0_B, torch.ones(64, 4), "wanted shape [64, 8] for this base model, got [64, 4]"),
    (Q0, torch.ones(8), "wanted shape [8, 64] for this base model, got [8]"),
    (Q0, torch.tensor(1.0), "wanted shape [0, 64] for this base model, got []"),
    (
        Q0,
        torch.ones(8, 64, dtype=torch.int8),
        "wanted one of ['BF16', 'F16', 'F32', 'F64'], got I8",
    ),
]


@pytest.mark.parametrize(("name", "value", "reason"), TENSOR_VALUES)
def test_a_tensor_that_is_wrong(name: str, value: torch.Tensor, reason: str, folder: Path) -> None:
    hp.edit_tensors(folder, lambda tensors: tensors | {name: value})
    error = refusal(folder)
    assert (error.file, error.item) == (folder / hp.WEIGHTS, name)
    assert reason in error.reason


def test_a_number_too_large_for_the_model(folder: Path) -> None:
    hp.edit_tensors(folder, lambda tensors: tensors | {Q0: torch.full((8, 64), 1e6)})
    with pytest.raises(AdapterError, match=r"holds numbers too large for torch\.float16"):
        read_adapter(folder, hp.tiny_spec(torch.float16))


def test_rank_of_the_config(folder: Path) -> None:
    hp.edit_config(folder, rank_pattern={"layers.1.self_attn.v_proj": 4})
    error = refusal(folder)
    assert error.item == hp.key(1, "self_attn.v_proj", "A")
    assert error.reason == "wanted rank 4 (r and rank_pattern of the config), got rank 8"


def test_an_adapter_that_touches_nothing(folder: Path) -> None:
    save_file({}, folder / hp.WEIGHTS)
    assert refusal(folder).reason == "wanted LoRA tensors of this model, got none"


def test_missing_files(folder: Path) -> None:
    (folder / hp.WEIGHTS).unlink()
    assert refusal(folder).reason == "is missing, and there is no adapter_model.bin either"
    (folder / hp.CONFIG).unlink()
    error = refusal(folder)
    assert error.file == folder / hp.CONFIG
    assert error.reason.startswith("cannot be read")
    error = refusal(folder / "gone")
    assert (error.item, error.reason) == ("folder", "is not a folder")


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\xff", b"[" * 100_000, b"1" * 5000])
def test_a_config_that_is_not_json(content: bytes, folder: Path) -> None:
    (folder / hp.CONFIG).write_bytes(content)
    assert refusal(folder).reason.startswith("is not JSON")


def test_a_config_that_is_a_list(folder: Path) -> None:
    (folder / hp.CONFIG).write_text("[]")
    assert refusal(folder).reason == "wanted a JSON object, got list"


@pytest.mark.parametrize("content", [b"", b"junk" * 100])
def test_a_broken_weights_file(content: bytes, folder: Path) -> None:
    (folder / hp.WEIGHTS).write_bytes(content)
    assert refusal(folder).reason.startswith("is not a readable safetensors file")


@pytest.mark.parametrize("name", ["a" * 5000, "zero\0byte"])
def test_a_path_that_no_file_system_has(name: str, folder: Path) -> None:
    assert refusal(folder / name).reason == "is not a folder"


def test_a_config_that_never_ends(folder: Path) -> None:
    (folder / hp.CONFIG).unlink()
    os.mkfifo(folder / hp.CONFIG)
    assert refusal(folder).reason == "is not a regular file"


def test_a_huge_config(folder: Path) -> None:
    with (folder / hp.CONFIG).open("r+b") as file:
        file.truncate(17 * 2**20)
    assert refusal(folder).reason == f"wanted at most {2**20} bytes"


@pytest.mark.parametrize("key", ["peft_type", "r", "bias", "init_lora_weights", "unknown"])
def test_a_deeply_nested_value(key: str, folder: Path) -> None:
    nested = f"{'[' * 800}{']' * 800}"
    (folder / hp.CONFIG).write_text(f'{{"peft_type": "LORA", "{key}": {nested}}}')
    assert len(str(refusal(folder))) < 1300


def test_the_message_is_one_printable_line(folder: Path) -> None:
    hp.edit_config(folder, **{"a\nb\x1b[31m\ud800": True})
    text = str(refusal(folder))
    assert text.isprintable()
    assert r"a\nb\x1b[31m\ud800: wanted it off" in text
    hp.edit_config(folder, r="x" * 100_000)
    assert len(str(refusal(folder))) < 1300
