from dataclasses import replace
from itertools import pairwise

import helpers_adapters as ha
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_graft.adapters import (
    Adapter,
    AdapterError,
    LinearSpec,
    ModelSpec,
    PointerTable,
    TileMap,
    measure,
    pack,
)
from sglang_graft.adapters.image import place

LINEARS = (LinearSpec("up", "mlp", "up", 40, 100), LinearSpec("down", "mlp", "down", 100, 40))


def spec(dtype: torch.dtype = torch.float16) -> ModelSpec:
    return ModelSpec(2, LINEARS, dtype)


def assert_round_trip(adapter: Adapter, tiles: TileMap) -> None:
    """Put the pages somewhere in an arena full of NaN and read every matrix back by address."""
    image = pack(adapter, tiles)
    count = image.pages.shape[0]
    pages = [2 * i + 1 for i in reversed(range(count))]
    arena = torch.full((2 * count + 1, tiles.page_bytes), 255, dtype=torch.uint8)
    arena[pages] = image.pages
    table = PointerTable(3, tiles, "cpu")
    table.set(2, image, pages, arena.data_ptr(), tiles.page_bytes)
    table.check_invariants()
    flat = arena.flatten()
    for (layer, name), delta in adapter.deltas.items():
        assert torch.equal(ha.read_matrix(table, flat, 2, layer, name, "A"), delta.a)
        assert torch.equal(ha.read_matrix(table, flat, 2, layer, name, "B"), delta.b.t())
        assert table.host_scales[2, tiles.column(layer, name)] == np.float32(delta.scale)
        for kind, wanted in (("mul", delta.mul), ("add", delta.add)):
            found = ha.read_vector(table, flat, 2, layer, name, kind)
            assert (found is None) == (wanted is None)
            assert found is None or torch.equal(found, wanted)


RANKS = st.dictionaries(
    st.tuples(st.integers(0, 1), st.sampled_from(["up", "down"])), st.integers(1, 64), min_size=1
)


@settings(max_examples=60, deadline=None)
@given(
    ranks=RANKS,
    page_bytes=st.sampled_from([512, 640, 1024, 1408, 4096, 1 << 16]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    rank_tile=st.sampled_from([4, 16]),
    vectors=st.sampled_from(["", "mul", "add", "mul add"]),
)
def test_round_trip(
    ranks, page_bytes: int, dtype: torch.dtype, rank_tile: int, vectors: str
) -> None:
    tiles = TileMap(spec(dtype), page_bytes, rank_tile=rank_tile, max_rank=64)
    assert_round_trip(ha.random_adapter(spec(dtype), ranks, vectors=vectors), tiles)


def test_vectors_are_split_only_when_they_outgrow_a_page() -> None:
    linear = LinearSpec("up", "mlp", "up", 8, 300)
    tiles = TileMap(ModelSpec(1, (linear,), torch.float16), 1024, rank_tile=1)
    assert tiles.vector(0, "up", "add").chunks == 2
    assert tiles.vector(0, "up", "add").chunk_features == 256
    adapter = ha.random_adapter(tiles.spec, {(0, "up"): 3}, vectors="mul add")
    assert_round_trip(adapter, tiles)
    assert pack(adapter, tiles).nbytes == 3 * (8 + 300) * 2 + 2 * 300 * 4


def test_measure_is_what_packing_comes_to() -> None:
    tiles = TileMap(spec(), 1024)
    adapter = ha.random_adapter(spec(), {(0, "up"): 7, (1, "down"): 20}, vectors="mul add")
    image = pack(adapter, tiles)
    assert measure(adapter, tiles) == (image.nbytes, image.pages.shape[0])


def test_what_is_not_complete_is_measured_but_not_packed() -> None:
    tiles = TileMap(spec(), 1024)
    adapter = ha.random_adapter(spec(), {(0, "up"): 7}, vectors="mul")
    (delta,) = adapter.deltas.values()
    bare = replace(delta, magnitude=torch.ones(100), mul=None)
    open_adapter = replace(adapter, deltas={(0, "up"): bare})
    assert measure(open_adapter, tiles) == measure(adapter, tiles)
    with pytest.raises(AdapterError, match="layer 0 up: DoRA needs the base model's weights"):
        pack(open_adapter, tiles)


@pytest.mark.parametrize("rank", [1, 2, 3, 5, 8, 12, 15, 16, 17, 31, 32, 33, 64])
def test_odd_ranks(rank: int) -> None:
    tiles = TileMap(spec(), 512, max_rank=64)
    assert tiles.side(0, "up", "B").chunks == 7  # the split is really under test
    adapter = ha.random_adapter(spec(), {(0, "up"): rank, (1, "down"): 65 - rank})
    assert_round_trip(adapter, tiles)


def test_true_ranks_and_absent_linears_take_no_bytes() -> None:
    tiles = TileMap(spec(), 4096)
    image = pack(ha.random_adapter(spec(), {(1, "up"): 5}), tiles)
    assert image.nbytes == 5 * (40 + 100) * 2
    assert image.pages.shape == (1, 4096)
    assert image.tile.tolist() == [tiles.side(1, "up", side).first for side in "AB"]
    assert image.ranks.tolist() == [0, 0, 5, 0]
    assert image.scales.tolist() == [0, 0, 7.5, 0]
    assert [image.tile.dtype, image.page.dtype, image.offset.dtype] == [
        np.int32,
        np.int32,
        np.int64,
    ]
    # B, the larger one, comes first; A follows at the next multiple of 128.
    assert (image.page.tolist(), image.offset.tolist()) == ([0, 0], [1024, 0])


def test_packing_is_deterministic_and_unused_bytes_are_zero() -> None:
    tiles = TileMap(spec(), 1024)
    adapter = ha.random_adapter(spec(), {(0, "up"): 7, (1, "down"): 20})
    first, second = pack(adapter, tiles), pack(adapter, tiles)
    assert torch.equal(first.pages, second.pages)
    assert first.offset.tolist() == second.offset.tolist()
    used = torch.zeros_like(first.pages, dtype=torch.bool)
    sizes = {
        tile.index: (tile.rank_stop - tile.rank_start) * (tile.stop - tile.start) * 2
        for (layer, name), delta in adapter.deltas.items()
        for side in ("A", "B")
        for tile in tiles.tiles_of(layer, name, side, delta.rank)
    }
    for tile, page, offset in zip(first.tile, first.page, first.offset, strict=True):
        used[page, offset : offset + sizes[tile]] = True
    assert not first.pages[~used].any()


def test_a_rank_above_the_limit_is_refused() -> None:
    tiles = TileMap(spec(), 4096, max_rank=16)
    with pytest.raises(AdapterError, match=r"layer 1 up: wanted a rank of at most 16, got 17"):
        pack(ha.random_adapter(spec(), {(0, "up"): 16, (1, "up"): 17}), tiles)


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(1, 1024), max_size=60))
def test_place_is_first_fit_decreasing(sizes: list[int]) -> None:
    places, count = place(sizes, 1024)
    # The plain definition: each size into the first page with room, looking from page 0 each time.
    used: list[int] = []
    wanted: dict[int, tuple[int, int]] = {}
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        page = next((p for p, u in enumerate(used) if u + sizes[index] <= 1024), len(used))
        if page == len(used):
            used.append(0)
        wanted[index] = (page, used[page])
        used[page] += -(-sizes[index] // 128) * 128
    assert places == [wanted[index] for index in range(len(sizes))]
    assert count == len(used)


@given(sizes=st.lists(st.integers(1, 2048), max_size=40))
def test_placed_tiles_are_aligned_and_disjoint(sizes: list[int]) -> None:
    places, count = place(sizes, 2048)
    taken: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for size, (page, offset) in zip(sizes, places, strict=True):
        assert offset % 128 == 0
        assert offset + size <= 2048
        taken[page].append((offset, offset + size))
    for spans in taken:
        spans.sort()
        assert spans
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
