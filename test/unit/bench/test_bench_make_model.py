"""A random model of a known shape is one that transformers loads."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_graft.bench.make_model import SHAPES, make_model
from sglang_graft.bench.shape import ModelShape


def test_the_tiny_model_loads_and_is_seeded(tmp_path: Path) -> None:
    folder = make_model("tiny", tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([[300, 400, 500]])).logits
    assert logits.shape == (1, 3, SHAPES["tiny"]["vocab_size"])
    assert logits.std() > 0.1
    shape = ModelShape.read(folder, "cpu")
    assert (shape.spec.layers, shape.kv_heads, shape.head_dim) == (3, 2, 16)
    same, other = make_model("tiny", tmp_path / "b"), make_model("tiny", tmp_path / "c", seed=1)
    weights = [(f / "model-1.safetensors").read_bytes() for f in (folder, same, other)]
    assert weights[0] == weights[1] != weights[2]


def test_an_unknown_shape(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"llama-3\.1-8b, tiny"):
        make_model("huge", tmp_path)
