import pytest
import torch

from sglang_graft.adapters import LinearSpec, ModelSpec, TileMap, TileRange, VectorRange

SPEC = ModelSpec(
    2,
    (LinearSpec("up", "mlp", "up", 64, 100), LinearSpec("down", "mlp", "down", 100, 64)),
    torch.float16,
)


def test_numbers_follow_layers_linears_and_sides() -> None:
    tiles = TileMap(SPEC, 4096, max_rank=40)  # 16 x 100 x 2 bytes fit: no split
    assert tiles.side(0, "up", "A") == TileRange(0, 3, 1, 64, 64)
    assert tiles.side(0, "up", "B") == TileRange(3, 3, 1, 100, 100)
    assert tiles.vector(0, "up", "mul") == VectorRange(6, 1, 100, 100)
    assert tiles.vector(0, "up", "add") == VectorRange(7, 1, 100, 100)
    assert tiles.side(0, "down", "A") == TileRange(8, 3, 1, 100, 100)
    assert tiles.side(1, "down", "B") == TileRange(27, 3, 1, 64, 64)
    assert tiles.vector(1, "down", "add") == VectorRange(31, 1, 64, 64)
    assert (tiles.tiles, tiles.columns) == (32, 4)
    assert [tiles.column(*at) for at in ((0, "up"), (0, "down"), (1, "up"), (1, "down"))] == [
        *range(4)
    ]


def test_features_are_split_only_when_a_tile_outgrows_a_page() -> None:
    tiles = TileMap(SPEC, 16 * 64 * 2, max_rank=20)
    assert tiles.side(0, "up", "A") == TileRange(0, 2, 1, 64, 64)
    assert tiles.side(0, "up", "B") == TileRange(2, 2, 2, 64, 100)
    # The chunk is the largest multiple of 8 that fits: 1408 / 32 = 44 features, so 40.
    assert TileMap(SPEC, 1408).side(0, "up", "B").chunk_features == 40
    # A vector of 100 features is 400 bytes.
    assert tiles.vector(0, "up", "mul").chunks == 1
    assert TileMap(SPEC, 384).vector(0, "up", "mul") == VectorRange(
        TileMap(SPEC, 384).side(0, "up", "B").first + 16 * 13, 2, 96, 100
    )


def test_tiles_of_a_rank() -> None:
    tiles = TileMap(SPEC, 16 * 64 * 2, max_rank=40)
    found = [
        (tile.index, tile.rank_start, tile.rank_stop, tile.start, tile.stop)
        for tile in tiles.tiles_of(0, "up", "B", 18)
    ]
    first = tiles.side(0, "up", "B").first
    assert found == [
        (first, 0, 16, 0, 64),
        (first + 1, 0, 16, 64, 100),
        (first + 2, 16, 18, 0, 64),
        (first + 3, 16, 18, 64, 100),
    ]
    assert list(tiles.tiles_of(0, "up", "B", 0)) == []


@pytest.mark.parametrize("page_bytes", [0, -128, 100, 1000])
def test_page_size_has_to_keep_tiles_aligned(page_bytes: int) -> None:
    with pytest.raises(ValueError, match="wanted a multiple of 128"):
        TileMap(SPEC, page_bytes)


def test_a_page_too_small_for_any_tile() -> None:
    with pytest.raises(ValueError, match=r"page_bytes: wanted at least 256 .* got 128"):
        TileMap(SPEC, 128)


def test_rank_limits() -> None:
    with pytest.raises(ValueError, match="rank_tile and max_rank"):
        TileMap(SPEC, 4096, max_rank=0)
