"""Packing: a checked adapter becomes page-sized pieces, ready for one copy per page."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_graft.adapters.adapter import Adapter, Delta
from sglang_graft.adapters.bits import Bits, bits, transposed
from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.tiles import TILE_ALIGNMENT, SideName, Tile, TileMap


@dataclass(frozen=True, slots=True, eq=False)
class AdapterImage:
    """An adapter packed at its true ranks.

    `pages` is uint8 `[n, page_bytes]` on the host (pinned if asked). Tile `tile[i]` of the tile map
    starts at byte `offset[i]` of page `page[i]`; the three are `[k]`, ascending by tile. `ranks`
    and `scales` are `[columns]`, 0 where the adapter does not touch the linear. `nbytes` counts the
    weights alone, without what alignment and the ends of pages leave unused.
    """

    identity: str
    pages: torch.Tensor
    tile: npt.NDArray[np.int32]
    page: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    ranks: npt.NDArray[np.int32]
    scales: npt.NDArray[np.float32]
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A, B or a vector of one linear, and the tiles that it fills, by ascending index.

    `tensor` is `[ranks, features]`, or `[features, ranks]` if `is_b`.
    """

    tiles: list[Tile]
    tensor: torch.Tensor
    is_b: bool = False

    def sizes(self) -> list[int]:
        """Bytes of each tile."""
        itemsize = self.tensor.itemsize
        return [(t.rank_stop - t.rank_start) * (t.stop - t.start) * itemsize for t in self.tiles]

    def bits(self) -> Bits:
        """`[ranks, features]`."""
        return transposed(self.tensor) if self.is_b else bits(self.tensor)


def pack(adapter: Adapter, tile_map: TileMap, *, pin: bool = False) -> AdapterImage:
    """Pack `adapter`; deterministic, and linears that it does not touch take no bytes.

    Raises AdapterError when a rank is above `tile_map.max_rank`, or DoRA was read without base
    weights. `pin` needs a CUDA device.
    """
    _check_complete(adapter)
    parts = _parts(adapter, tile_map)
    sizes = [size for part in parts for size in part.sizes()]
    places, count = place(sizes, tile_map.page_bytes)
    pages = _empty_pages(count, tile_map.page_bytes, pin)
    _fill(pages, parts, places)
    ranks, scales = _columns(adapter, tile_map)
    return AdapterImage(
        identity=adapter.identity,
        pages=pages,
        tile=np.array([tile.index for part in parts for tile in part.tiles], dtype=np.int32),
        page=np.array([page for page, _ in places], dtype=np.int32),
        offset=np.array([offset for _, offset in places], dtype=np.int64),
        ranks=ranks,
        scales=scales,
        nbytes=sum(sizes),
    )


def measure(adapter: Adapter, tile_map: TileMap) -> tuple[int, int]:
    """`nbytes` and the number of pages that `pack` would come to; complete or not. Errors as there.

    Without base weights the `add` of DoRA on a linear with a bias is not counted.
    """
    sizes = [size for part in _parts(adapter, tile_map) for size in part.sizes()]
    return sum(sizes), place(sizes, tile_map.page_bytes)[1]


def place(sizes: list[int], page_bytes: int) -> tuple[list[tuple[int, int]], int]:
    """First-fit decreasing: `(page, offset)` of each size in bytes, and the number of pages.

    Ties go by position. A page that once had no room for a size never has room for it again, so one
    pointer per distinct size replaces the search from page 0: O(n log n + distinct sizes * pages).
    """
    places: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    used: list[int] = []
    page, current = 0, 0
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        assert 0 < size <= page_bytes, f"tile of {size} bytes, page of {page_bytes}"
        if size != current:
            page, current = 0, size
        while page < len(used) and used[page] + size > page_bytes:
            page += 1
        if page == len(used):
            used.append(0)
        places[index] = (page, used[page])
        used[page] += -(-size // TILE_ALIGNMENT) * TILE_ALIGNMENT
    return places, len(used)


def _empty_pages(count: int, page_bytes: int, pin: bool) -> torch.Tensor:
    # Zeros, not empty: unused bytes are copied too, and an image must not depend on old memory.
    if pin:
        return torch.zeros((count, page_bytes), dtype=torch.uint8, pin_memory=True)
    # numpy asks the system for huge pages, torch does not.
    return torch.from_numpy(np.zeros((count, page_bytes), dtype=np.uint8))


def _fill(pages: torch.Tensor, parts: list[_Part], places: list[tuple[int, int]]) -> None:
    """Copy every tile to its `(page, offset)`; `places` are in the order of parts and tiles."""
    rows, spots = pages.numpy(), iter(places)
    for part in parts:
        source = part.bits()
        for tile in part.tiles:
            page, offset = next(spots)
            piece = source[tile.rank_start : tile.rank_stop, tile.start : tile.stop]
            room = rows[page, offset : offset + piece.nbytes].view(piece.dtype)
            room.reshape(piece.shape)[...] = piece


def _parts(adapter: Adapter, tile_map: TileMap) -> list[_Part]:
    """By ascending tile index."""
    _check_ranks(adapter, tile_map)
    parts = [
        part
        for (layer, name), delta in adapter.deltas.items()
        for part in _parts_of(tile_map, layer, name, delta)
    ]
    return sorted(parts, key=lambda part: part.tiles[0].index)


def _check_ranks(adapter: Adapter, tile_map: TileMap) -> None:
    for (layer, name), delta in adapter.deltas.items():
        if delta.rank > tile_map.max_rank:
            raise AdapterError(
                adapter.path,
                f"layer {layer} {name}",
                f"wanted a rank of at most {tile_map.max_rank}, got {delta.rank}; "
                "set --max-lora-rank to at least that",
            )


def _check_complete(adapter: Adapter) -> None:
    for (layer, name), delta in adapter.deltas.items():
        if not delta.is_complete:
            raise AdapterError(
                adapter.path,
                f"layer {layer} {name}",
                "DoRA needs the base model's weights; pass base_weight to read_adapter",
            )


def _parts_of(tile_map: TileMap, layer: int, name: str, delta: Delta) -> Iterator[_Part]:
    sides: tuple[tuple[SideName, torch.Tensor], ...] = (("A", delta.a), ("B", delta.b))
    for side, matrix in sides:
        wanted = [delta.rank, tile_map.side(layer, name, side).features]
        shape = list(matrix.shape)[:: 1 if side == "A" else -1]
        assert shape == wanted, (name, side, matrix.shape, wanted)
        assert matrix.dtype == tile_map.spec.dtype, (matrix.dtype, tile_map.spec.dtype)
        tiles = list(tile_map.tiles_of(layer, name, side, delta.rank))
        yield _Part(tiles, matrix, is_b=side == "B")
    for kind, vector in delta.vectors():
        features = tile_map.vector(layer, name, kind).features
        assert vector.shape == (features,), (name, kind, vector.shape, features)
        assert vector.dtype == torch.float32, (name, kind, vector.dtype)
        yield _Part(list(tile_map.tiles_of_vector(layer, name, kind)), vector[None])


def _columns(
    adapter: Adapter, tile_map: TileMap
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    ranks = np.zeros(tile_map.columns, dtype=np.int32)
    scales = np.zeros(tile_map.columns, dtype=np.float32)
    for (layer, name), delta in adapter.deltas.items():
        column = tile_map.column(layer, name)
        ranks[column] = delta.rank
        scales[column] = delta.scale
    return ranks, scales
