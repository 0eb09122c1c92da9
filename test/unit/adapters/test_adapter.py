"""The identity names what is applied, and nothing else."""

import shutil
from pathlib import Path

import helpers_peft as hp
import torch
from safetensors.torch import load_file, save_file

from sglang_graft.adapters import read_adapter


def identity(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    return read_adapter(folder, hp.tiny_spec(dtype)).identity


def test_same_wherever_and_in_whatever_order(tmp_path: Path) -> None:
    hp.save_adapter(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    backwards = dict(reversed(load_file(tmp_path / "a" / hp.WEIGHTS).items()))
    save_file(backwards, tmp_path / "b" / hp.WEIGHTS, metadata={"format": "pt", "note": "x"})
    hp.edit_config(tmp_path / "b", base_model_name_or_path="else", lora_dropout=0.5)
    assert identity(tmp_path / "a") == identity(tmp_path / "b")
    assert len(identity(tmp_path / "a")) == 64


def test_config_only_counts_as_far_as_it_is_applied(tmp_path: Path) -> None:
    hp.save_adapter(tmp_path, r=4, lora_alpha=8)
    before = identity(tmp_path)
    hp.edit_config(tmp_path, lora_alpha=1, alpha_pattern={".*": 8})
    assert identity(tmp_path) == before
    hp.edit_config(tmp_path, alpha_pattern={".*": 9})
    assert identity(tmp_path) != before


def test_rslora_bytes_and_dtype_count(tmp_path: Path) -> None:
    hp.save_adapter(tmp_path, r=4, lora_alpha=8)
    seen = {identity(tmp_path), identity(tmp_path, torch.float16)}
    hp.edit_config(tmp_path, use_rslora=True)
    seen.add(identity(tmp_path))

    def nudge(tensors: hp.Tensors) -> None:
        tensors[hp.key(1, "self_attn.v_proj", "B")][3, 2] += 1

    hp.edit_tensors(tmp_path, nudge)
    seen.add(identity(tmp_path))
    assert len(seen) == 4


def test_the_layer_counts(tmp_path: Path) -> None:
    hp.save_adapter(tmp_path, layers_to_transform=[0])
    before = identity(tmp_path)
    hp.edit_tensors(
        tmp_path,
        lambda tensors: {name.replace("layers.0", "layers.1"): t for name, t in tensors.items()},
    )
    assert identity(tmp_path) != before


def test_max_rank(tmp_path: Path) -> None:
    hp.save_adapter(tmp_path, r=4, rank_pattern={"v_proj": 20})
    assert read_adapter(tmp_path, hp.tiny_spec()).max_rank == 20
