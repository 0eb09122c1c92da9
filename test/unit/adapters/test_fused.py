"""Fused tensors (one A, tall B) are split by the members' sizes."""

from pathlib import Path

import helpers_peft as hp
import pytest
import torch
from safetensors.torch import save_file

from sglang_graft.adapters import AdapterError, read_adapter

SPLITS = {
    "self_attn.qkv_proj": {"q_proj": 64, "k_proj": 32, "v_proj": 32},
    "mlp.gate_up_proj": {"gate_proj": 96, "up_proj": 96},
}


def write_fused(folder: Path, module: str, rank: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    hp.save_adapter(folder, r=rank)
    a, b = torch.randn(rank, 64), torch.randn(sum(SPLITS[module].values()), rank)
    save_file({hp.key(0, module, "A"): a, hp.key(0, module, "B"): b}, folder / hp.WEIGHTS)
    return a, b


@pytest.mark.parametrize("module", SPLITS)
def test_split(module: str, tmp_path: Path) -> None:
    a, b = write_fused(tmp_path, module)
    deltas = read_adapter(tmp_path, hp.tiny_spec()).deltas
    assert deltas.keys() == {(0, name) for name in SPLITS[module]}
    parts = torch.split(b, list(SPLITS[module].values()))
    for name, part in zip(SPLITS[module], parts, strict=True):
        assert torch.equal(deltas[0, name].a, a)
        assert torch.equal(deltas[0, name].b, part)


def test_patterns_speak_of_the_fused_module(tmp_path: Path) -> None:
    write_fused(tmp_path, "self_attn.qkv_proj")
    hp.edit_config(tmp_path, alpha_pattern={"qkv_proj": 10, "q_proj": 99}, target_modules=None)
    adapter = read_adapter(tmp_path, hp.tiny_spec())
    assert {delta.scale for delta in adapter.deltas.values()} == {2.5}
    assert len(adapter.warnings) == 1


def test_same_identity_as_the_split_spelling(tmp_path: Path) -> None:
    a, b = write_fused(tmp_path, "mlp.gate_up_proj")
    fused = read_adapter(tmp_path, hp.tiny_spec()).identity
    tensors = {}
    for name, part in zip(("gate_proj", "up_proj"), b.split(96), strict=True):
        tensors[hp.key(0, f"mlp.{name}", "A")] = a.clone()
        tensors[hp.key(0, f"mlp.{name}", "B")] = part.clone()
    save_file(tensors, tmp_path / hp.WEIGHTS)
    assert read_adapter(tmp_path, hp.tiny_spec()).identity == fused


def test_wrong_height_is_refused(tmp_path: Path) -> None:
    write_fused(tmp_path, "self_attn.qkv_proj")
    name = hp.key(0, "self_attn.qkv_proj", "B")
    hp.edit_tensors(tmp_path, lambda tensors: tensors | {name: torch.ones(192, 4)})
    with pytest.raises(AdapterError, match=r"wanted shape \[128, 4\] .* got \[192, 4\]"):
        read_adapter(tmp_path, hp.tiny_spec())


def test_fused_and_split_together_are_refused(tmp_path: Path) -> None:
    write_fused(tmp_path, "self_attn.qkv_proj")
    extra = {
        hp.key(0, "self_attn.v_proj", "A"): torch.ones(4, 64),
        hp.key(0, "self_attn.v_proj", "B"): torch.ones(32, 4),
    }
    hp.edit_tensors(tmp_path, lambda tensors: tensors | extra)
    with pytest.raises(AdapterError, match=r"touches v_proj, as .*qkv_proj does already"):
        read_adapter(tmp_path, hp.tiny_spec())
