"""Equal bytes for every peer: the arithmetic, by hand."""

import json
from pathlib import Path

import pytest
from helpers_bench import save_config

from sglang_graft.bench.budget import largest_request, split
from sglang_graft.bench.peers import parse_peers
from sglang_graft.bench.shape import ModelShape
from sglang_graft.bench.units import Load

LOAD = Load(name="chat", rate=4.0, seconds=4.0, adapters=4)
# K and V, 2 layers, one head of 4, 4 bytes a number.
TOKEN = 2 * 2 * 4 * 4
# q 8+8, k and v 8+4 each, o 8+8, gate and up 8+16 each, down 16+8; 2 layers, 4 bytes.
RANK = (16 + 2 * 12 + 16 + 2 * 24 + 24) * 2 * 4


@pytest.fixture
def shape(tmp_path: Path) -> ModelShape:
    return ModelShape.read(save_config(tmp_path / "model"), "cpu")


def test_sizes_of_the_model(shape: ModelShape) -> None:
    assert (shape.kv_bytes_per_token, shape.adapter_bytes_per_rank) == (TOKEN, RANK)
    assert shape.layout.page_bytes == TOKEN * shape.page_tokens
    assert shape.sizes.page_bytes == shape.layout.page_bytes
    assert shape.dtype_name == "float32"


def test_a_llama_8b_has_the_sizes_of_the_protocol(tmp_path: Path) -> None:
    from sglang_graft.bench.make_model import SHAPES

    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"]))
    shape = ModelShape.read(tmp_path, "cuda")
    assert shape.kv_bytes_per_token == 128 * 1024
    assert shape.adapter_bytes_per_rank * 16 == pytest.approx(84e6, rel=0.01)
    assert shape.layout.page_bytes == 2 << 20


def test_stock_pays_for_slots_first(shape: ModelShape) -> None:
    workload = LOAD.workload()
    peers = parse_peers(["stock:2,4", "base", "graft:lru"])
    budget_gb = 1e-3
    small, large, base, graft = (split(peer, budget_gb, shape, workload) for peer in peers)
    assert (small.adapter_bytes, large.adapter_bytes) == (2 * 32 * RANK, 4 * 32 * RANK)
    # All in whole pages: SGLang rounds down to them, and the sides must be equal.
    page = TOKEN * shape.page_tokens
    assert small.kv_tokens == (1_000_000 - 2 * 32 * RANK) // page * shape.page_tokens
    assert (1_000_000 - 2 * 32 * RANK) // TOKEN % shape.page_tokens != 0
    assert base.kv_tokens == graft.kv_tokens == 1_000_000 // page * shape.page_tokens
    for cut in (small, large, base, graft):
        assert not cut.problem
        assert cut.adapter_bytes + cut.kv_bytes <= cut.budget_bytes
        assert cut.budget_bytes - cut.adapter_bytes - cut.kv_bytes < TOKEN * shape.page_tokens
        assert str(cut.kv_tokens) in cut.arithmetic


def test_a_budget_that_is_too_small_is_said(shape: ModelShape) -> None:
    workload = LOAD.workload()
    assert largest_request(workload) == 512 + 4 * (256 + 64)
    enough = largest_request(workload) * TOKEN
    for peer in parse_peers(["stock:2", "base", "graft:lru"]):
        cut = split(peer, (enough - TOKEN) / 1e9, shape, workload)
        assert "1792 tokens" in cut.problem or "the longest request" in cut.problem
    assert not split(parse_peers(["base"])[0], enough / 1e9, shape, workload).problem
    slots = split(parse_peers(["stock:8"])[0], enough / 1e9, shape, workload)
    assert slots.kv_tokens == 0
    assert slots.problem


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelShape.read(tmp_path, "cpu")
    with pytest.raises(ValueError, match="cpu, cuda"):
        ModelShape.read(tmp_path, "tpu")
