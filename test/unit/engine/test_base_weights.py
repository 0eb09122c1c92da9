"""What adapters see of a model built from SGLang's own linears."""

from typing import Any

import pytest
import torch
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_graft.adapters import BaseWeight, NoBaseWeight
from sglang_graft.engine.base_weights import base_weight_reader
from sglang_graft.engine.model_spec import model_spec

HIDDEN, INNER, VOCABULARY = 16, 24, 100
SIZES = {"q_proj": 16, "k_proj": 8, "v_proj": 8}


def block(**children: torch.nn.Module) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def build(layers: int = 2) -> Any:
    """A model of `layers` with biases on q, k, v only, every number of it different."""
    common = {"tp_rank": 0, "tp_size": 1, "params_dtype": torch.float32}
    stack = []
    for _ in range(layers):
        attention = block(
            qkv_proj=QKVParallelLinear(HIDDEN, 4, 4, 2, bias=True, **common),
            o_proj=RowParallelLinear(HIDDEN, HIDDEN, bias=False, **common),
        )
        mlp = block(
            gate_up_proj=MergedColumnParallelLinear(HIDDEN, [INNER] * 2, bias=False, **common),
            down_proj=RowParallelLinear(INNER, HIDDEN, bias=False, **common),
        )
        stack.append(block(self_attn=attention, mlp=mlp))
    embedding = VocabParallelEmbedding(
        VOCABULARY, HIDDEN, enable_tp=False, params_dtype=torch.float32
    )
    inner = block(embed_tokens=embedding, layers=torch.nn.ModuleList(stack))
    model = block(model=inner, lm_head=embedding)
    start = 0
    for parameter in model.parameters():
        numbers = torch.arange(start, start + parameter.numel(), dtype=torch.float32)
        parameter.data.copy_(numbers.view(parameter.shape))
        start += parameter.numel()
    return model


def reader(model: Any, allowed: str = "all") -> BaseWeight:
    return base_weight_reader(model, model_spec(model, {allowed}, torch.float32, VOCABULARY))


def test_stacked_linears_are_taken_apart() -> None:
    model = build()
    read = reader(model)
    for layer in range(2):
        attention, mlp = model.model.layers[layer].self_attn, model.model.layers[layer].mlp
        parts = [read(layer, name) for name in SIZES]
        assert [len(weight) for weight, _ in parts] == list(SIZES.values())
        assert torch.equal(torch.cat([weight for weight, _ in parts]), attention.qkv_proj.weight)
        assert torch.equal(torch.cat([bias for _, bias in parts]), attention.qkv_proj.bias)
        halves = [read(layer, name) for name in ("gate_proj", "up_proj")]
        assert torch.equal(torch.cat([weight for weight, _ in halves]), mlp.gate_up_proj.weight)
        assert [bias for _, bias in halves] == [None, None]
        assert torch.equal(read(layer, "o_proj")[0], attention.o_proj.weight)
        assert torch.equal(read(layer, "down_proj")[0], mlp.down_proj.weight)


def test_only_what_is_served() -> None:
    read = reader(build(), "down_proj")
    assert read(1, "down_proj")[0].shape == (HIDDEN, INNER)
    with pytest.raises(KeyError):
        read(0, "q_proj")


def test_embeddings_without_their_padding() -> None:
    model = build()
    read = reader(model)
    assert len(model.lm_head.weight) > VOCABULARY
    for name in ("lm_head", "embed_tokens"):  # tied: one module under two names
        weight, bias = read(None, name)
        assert torch.equal(weight, model.lm_head.weight[:VOCABULARY])
        assert bias is None
    with pytest.raises(NoBaseWeight, match="has no score"):
        read(None, "score")


def test_parameters_replaced_after_loading_are_seen() -> None:
    model = build()
    read = reader(model)
    projection = model.model.layers[0].mlp.down_proj
    projection.weight = torch.nn.Parameter(torch.ones(HIDDEN, INNER))
    assert (read(0, "down_proj")[0] == 1).all()


def test_a_bias_that_is_added_later_is_not_the_linears() -> None:
    model = build()
    model.model.layers[0].self_attn.qkv_proj.skip_bias_add = True
    assert reader(model)(0, "q_proj")[1] is None


class Quantized:
    """Stands for any of SGLang's methods that hold no plain weight."""


def test_quantized_linears_have_no_plain_weights() -> None:
    model = build()
    read = reader(model)
    model.model.layers[1].mlp.down_proj.quant_method = Quantized()
    with pytest.raises(NoBaseWeight, match=r"down_proj is quantized \(Quantized\); serve the unq"):
        read(1, "down_proj")
    projection = model.model.layers[0].mlp.down_proj
    projection.weight = torch.nn.Parameter(
        torch.ones(HIDDEN, INNER, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(NoBaseWeight, match=r"down_proj is held as torch\.int8"):
        read(0, "down_proj")


def test_packed_linears_have_no_plain_weights() -> None:
    model = build()
    model.model.layers[0].mlp.down_proj.use_intel_amx_backend = True
    with pytest.raises(NoBaseWeight, match="packed for AMX"):
        reader(model)(0, "down_proj")
