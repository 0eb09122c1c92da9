"""What reading does besides the format table (test_formats.py): casts, copies, gaps, defaults."""

import os
from pathlib import Path

import helpers_peft as hp
import pytest
import torch

from sglang_graft.adapters import AdapterError, read_adapter
from sglang_graft.adapters.weights import open_weights


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("served", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_cast_once(stored: torch.dtype, served: torch.dtype, tmp_path: Path) -> None:
    hp.save_adapter(tmp_path)
    saved: hp.Tensors = {}

    def cast(tensors: hp.Tensors) -> hp.Tensors:
        saved.update({name: tensor.to(stored) for name, tensor in tensors.items()})
        return saved

    hp.edit_tensors(tmp_path, cast)
    delta = read_adapter(tmp_path, hp.tiny_spec(served)).deltas[1, "q_proj"]
    assert torch.equal(delta.a, saved[hp.key(1, "self_attn.q_proj", "A")].to(served))
    assert torch.equal(delta.b, saved[hp.key(1, "self_attn.q_proj", "B")].to(served))


def test_weights_outlive_the_file(tmp_path: Path) -> None:
    hp.save_adapter(tmp_path)
    delta = read_adapter(tmp_path, hp.tiny_spec()).deltas[0, "q_proj"]
    before = delta.a.clone()
    with (tmp_path / hp.WEIGHTS).open("r+b") as file:
        file.truncate(0)
    assert torch.equal(delta.a, before)


@pytest.mark.parametrize("served", [torch.float32, torch.float16])
def test_a_file_cut_short_while_it_is_read_is_an_error_and_no_crash(
    served: torch.dtype, tmp_path: Path
) -> None:
    hp.save_adapter(tmp_path)
    file = tmp_path / hp.WEIGHTS
    with open_weights(tmp_path) as weights:
        first, *_, last = weights.names()
        whole = weights.load(first, served)
        os.truncate(file, file.stat().st_size - 1)
        assert torch.equal(weights.load(first, served), whole), "its bytes are there"
        with pytest.raises(AdapterError, match="was cut short while it was read") as caught:
            weights.load(last, served)
        assert caught.value.item == last
    with pytest.raises(AdapterError, match="is not a readable safetensors file"):
        read_adapter(tmp_path, hp.tiny_spec())


def test_missing_modules_are_no_delta(tmp_path: Path) -> None:
    hp.save_adapter(tmp_path)

    def drop(tensors: hp.Tensors) -> None:
        for side in "AB":
            del tensors[hp.key(0, "self_attn.v_proj", side)]

    hp.edit_tensors(tmp_path, drop)
    deltas = read_adapter(tmp_path, hp.tiny_spec()).deltas
    assert list(deltas) == [(0, "q_proj"), (1, "q_proj"), (1, "v_proj")]


def test_missing_config_keys_have_peft_defaults(tmp_path: Path) -> None:
    hp.save_adapter(tmp_path, r=8, lora_alpha=8)
    wanted = read_adapter(tmp_path, hp.tiny_spec()).identity
    (tmp_path / hp.CONFIG).write_text('{"peft_type": "LORA"}')
    assert read_adapter(tmp_path, hp.tiny_spec()).identity == wanted
