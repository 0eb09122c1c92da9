import helpers_adapters as ha
import pytest
import torch

from sglang_graft.adapters import AdapterImage, LinearSpec, ModelSpec, PointerTable, TileMap, pack

SPEC = ModelSpec(1, (LinearSpec("up", "mlp", "up", 64, 96),), torch.float16)
TILES = TileMap(SPEC, 2048, max_rank=32)  # A: tiles 0, 1; B: tiles 2..5, chunks of 64; mul 6, add 7
BASE = 1 << 40


def image(rank: int, seed: int = 0, vectors: str = "") -> AdapterImage:
    return pack(ha.random_adapter(SPEC, {(0, "up"): rank}, seed, vectors), TILES)


def test_addresses() -> None:
    packed = image(16)
    assert (packed.page.tolist(), packed.offset.tolist()) == ([0, 1, 2], [0, 0, 0])
    table = PointerTable(3, TILES, "cpu")
    table.set(1, packed, [7, 3, 9], BASE, 2048)
    wanted = [BASE + 7 * 2048, 0, BASE + 3 * 2048, BASE + 9 * 2048, 0, 0, 0, 0]
    assert table.addresses[1].tolist() == wanted
    assert table.ranks.tolist() == [[0], [16], [0]]
    assert table.scales.tolist() == [[0], [24], [0]]
    table.check_invariants()


def test_a_smaller_adapter_leaves_nothing_of_the_larger_one() -> None:
    table = PointerTable(2, TILES, "cpu")
    table.set(1, image(32), list(range(1, image(32).pages.shape[0] + 1)), BASE, 2048)
    assert table.addresses[1].count_nonzero() == 6
    table.set(1, image(2), [1], BASE, 2048)
    assert table.addresses[1].count_nonzero() == 3
    table.check_invariants()
    table.clear(1)
    assert not table.addresses.any()
    assert not table.ranks.any()
    assert not table.scales.any()
    table.check_invariants()


@pytest.mark.parametrize(("vectors", "tiles"), [("mul", {6}), ("add", {7}), ("mul add", {6, 7})])
def test_vectors_come_and_go_with_their_adapter(vectors: str, tiles: set[int]) -> None:
    table = PointerTable(2, TILES, "cpu")
    table.set(1, image(2, vectors=vectors), [1], BASE, 2048)
    table.check_invariants()
    assert set(table.addresses[1].nonzero().flatten().tolist()) == {0, 2, 3} | tiles
    table.set(1, image(2), [1], BASE, 2048)
    table.check_invariants()
    assert set(table.addresses[1].nonzero().flatten().tolist()) == {0, 2, 3}


def test_check_invariants_sees_vectors_out_of_place() -> None:
    narrow = TileMap(ModelSpec(1, (LinearSpec("up", "mlp", "up", 8, 300),), torch.float16), 1024)
    table = PointerTable(2, narrow, "cpu")
    adapter = ha.random_adapter(narrow.spec, {(0, "up"): 1}, vectors="add")
    pages = list(range(1, pack(adapter, narrow).pages.shape[0] + 1))
    first = narrow.vector(0, "up", "add").first
    for broken in (first, first + 1):
        table.set(1, pack(adapter, narrow), pages, BASE, 1024)
        table.check_invariants()
        table.host_addresses[1, broken] = 0
        with pytest.raises(AssertionError, match="slot 1: tiles do not fit its ranks"):
            table.check_invariants()
    table.clear(1)
    table.host_addresses[1, first : first + 2] = BASE  # a vector where the rank is 0
    with pytest.raises(AssertionError, match="slot 1: tiles do not fit its ranks"):
        table.check_invariants()


def test_on_the_cpu_both_tables_are_one() -> None:
    table = PointerTable(2, TILES, "cpu")
    assert table.addresses is table.host_addresses
    assert table.ranks is table.host_ranks
    assert table.scales is table.host_scales
    assert [t.dtype for t in (table.addresses, table.ranks, table.scales)] == [
        torch.int64,
        torch.int32,
        torch.float32,
    ]


@pytest.mark.parametrize("slot", [0, -1, 3])
def test_slots_that_cannot_be_set(slot: int) -> None:
    table = PointerTable(3, TILES, "cpu")
    with pytest.raises(ValueError, match=rf"wanted 1\.\.2 .* got {slot}"):
        table.set(slot, image(2), [1], BASE, 2048)
    with pytest.raises(ValueError, match=rf"wanted 1\.\.2 .* got {slot}"):
        table.clear(slot)


def test_wrong_pages() -> None:
    table = PointerTable(2, TILES, "cpu")
    with pytest.raises(ValueError, match="pages: wanted 1, got 2"):
        table.set(1, image(2), [1, 2], BASE, 2048)
    with pytest.raises(ValueError, match="page_bytes: wanted 2048, got 4096"):
        table.set(1, image(2), [1], BASE, 4096)
    with pytest.raises(ValueError, match="slots: wanted at least 2"):
        PointerTable(1, TILES, "cpu")


def test_check_invariants_sees_broken_rows() -> None:
    table = PointerTable(2, TILES, "cpu")
    table.set(1, image(2), [1], BASE, 2048)
    table.host_ranks[1, 0] = 17
    with pytest.raises(AssertionError, match="slot 1: tiles do not fit its ranks"):
        table.check_invariants()
    table.clear(1)
    table.host_scales[0, 0] = 1
    with pytest.raises(AssertionError, match="slot 0"):
        table.check_invariants()


def test_rank_tiles_follow_the_slots() -> None:
    table = PointerTable(3, TILES, "cpu")
    assert table.rank_tiles().tolist() == [0, 0, 0]
    for rank, tiles in ((32, 2), (2, 1)):  # of 16 ranks each
        table.set(1, image(rank), list(range(1, len(image(rank).pages) + 1)), BASE, 2048)
        assert table.rank_tiles().tolist() == [0, tiles, 0]
        table.check_invariants()
    table.clear(1)
    assert table.rank_tiles().tolist() == [0, 0, 0]
    table._rank_tiles[2] = 1
    with pytest.raises(AssertionError, match="rank tiles"):
        table.check_invariants()


def test_rank_tiles_are_those_of_the_widest_linear_of_each_slot() -> None:
    linears = tuple(LinearSpec(name, "mlp", name, 64, 96) for name in ("up", "gate"))
    tiles = TileMap(ModelSpec(1, linears, torch.float16), 2048, max_rank=32)
    table = PointerTable(4, tiles, "cpu")
    for slot, ranks in ((3, {(0, "up"): 17, (0, "gate"): 2}), (2, {(0, "gate"): 16})):
        packed = pack(ha.random_adapter(tiles.spec, ranks), tiles)
        table.set(slot, packed, list(range(1, len(packed.pages) + 1)), BASE, 2048)
        table.check_invariants()
    assert table.rank_tiles().tolist() == [0, 0, 1, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_table_is_refreshed_in_place() -> None:
    table = PointerTable(2, TILES, "cuda")
    before = table.addresses.data_ptr()
    # Two changes with no synchronisation between: the later one must win, and neither may tear.
    table.set(1, image(32), list(range(1, image(32).pages.shape[0] + 1)), BASE, 2048)
    table.set(1, image(2), [1], BASE, 2048)
    torch.cuda.synchronize()
    assert table.addresses.data_ptr() == before
    table.check_invariants()
