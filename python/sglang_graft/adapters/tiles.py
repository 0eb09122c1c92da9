"""The fixed numbering of tiles: which one holds which part of which matrix or vector.

A tile is up to `rank_tile` ranks times a chunk of the features of one A or one B matrix. It is
stored contiguous and rank-major, `[ranks, features]`:

    A tile = a[r0:r1, f0:f1]          (features are the inputs)
    B tile = b.T[r0:r1, f0:f1]        (features are the outputs, so B is stored transposed)

Only the ranks and features that exist are stored, so the row stride of a tile is its own width:
`chunk_features`, or less in the last chunk of a side. Behind the tiles of A and B, each linear has
those of two vectors over its outputs, `mul` and `add`: float32, one value a feature. An adapter has
all chunks of a vector or none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sglang_graft.adapters.spec import ModelSpec

SideName = Literal["A", "B"]
VectorName = Literal["mul", "add"]

VECTORS: tuple[VectorName, VectorName] = ("mul", "add")
VECTOR_ITEMSIZE = 4
"""Bytes of a float32."""

TILE_ALIGNMENT = 128
"""Bytes. Tiles start at a multiple of it inside their page, for full-width loads."""

_CHUNK_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class TileRange:
    """The tiles of one side (A or B) of one linear of one layer.

    Tile `first + i * chunks + j` holds ranks from `i * rank_tile` of the map and features from
    `j * chunk_features`. `rank_tiles` is the number of i for the largest allowed rank.
    """

    first: int
    rank_tiles: int
    chunks: int
    chunk_features: int
    features: int


@dataclass(frozen=True, slots=True)
class VectorRange:
    """The tiles of one vector of one linear of one layer.

    Chunk j is `first + j` and holds features `j * chunk_features` up to the next chunk's.
    """

    first: int
    chunks: int
    chunk_features: int
    features: int


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile that a matrix of a given rank really has: `[rank_stop-rank_start, stop-start]`."""

    index: int
    rank_start: int
    rank_stop: int
    start: int
    stop: int


class TileMap:
    """Numbers all tiles and all linears of a model for pages of `page_bytes`. Immutable.

    `tiles` and `columns` are the widths of the pointer table and of its ranks and scales; a column
    is one linear of one layer. Raises ValueError when a page cannot hold 8 features of a full tile.
    """

    def __init__(
        self, spec: ModelSpec, page_bytes: int, rank_tile: int = 16, max_rank: int = 256
    ) -> None:
        if rank_tile < 1 or max_rank < 1:
            raise ValueError(
                f"rank_tile and max_rank: wanted at least 1, got {rank_tile} and {max_rank}"
            )
        if page_bytes < 1 or page_bytes % TILE_ALIGNMENT:
            raise ValueError(
                f"page_bytes: wanted a multiple of {TILE_ALIGNMENT}, got {page_bytes}; "
                "set --page-size to more tokens"
            )
        self.spec = spec
        self.page_bytes = page_bytes
        self.rank_tile = rank_tile
        self.max_rank = max_rank
        self.itemsize = spec.dtype.itemsize
        self._columns: dict[tuple[int, str], int] = {}
        self._sides: dict[tuple[int, str, str], TileRange] = {}
        self._vectors: dict[tuple[int, str, str], VectorRange] = {}
        self.tiles = 0
        for layer in range(spec.layers):
            for linear in spec.linears:
                self._columns[layer, linear.name] = len(self._columns)
                self._sides[layer, linear.name, "A"] = self._append(linear.in_features)
                self._sides[layer, linear.name, "B"] = self._append(linear.out_features)
                for name in VECTORS:
                    vector = self._append_vector(linear.out_features)
                    self._vectors[layer, linear.name, name] = vector
        self.columns = len(self._columns)

    def _append(self, features: int) -> TileRange:
        rank_tiles = -(-self.max_rank // self.rank_tile)
        chunk = self._chunk_features(features)
        side = TileRange(self.tiles, rank_tiles, -(-features // chunk), chunk, features)
        self.tiles += side.rank_tiles * side.chunks
        return side

    def _append_vector(self, features: int) -> VectorRange:
        chunk = min(features, self.page_bytes // VECTOR_ITEMSIZE)
        vector = VectorRange(self.tiles, -(-features // chunk), chunk, features)
        self.tiles += vector.chunks
        return vector

    def _chunk_features(self, features: int) -> int:
        if self.rank_tile * features * self.itemsize <= self.page_bytes:
            return features
        fitting = self.page_bytes // (self.rank_tile * self.itemsize)
        chunk = fitting // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE
        if chunk == 0:
            raise ValueError(
                f"page_bytes: wanted at least {self.rank_tile * _CHUNK_MULTIPLE * self.itemsize} "
                f"(a tile of {self.rank_tile} ranks x {_CHUNK_MULTIPLE} features), "
                f"got {self.page_bytes}; set --page-size to more tokens"
            )
        return chunk

    def side(self, layer: int, linear: str, side: SideName) -> TileRange:
        """The tiles of A or B of one linear. KeyError for a layer or linear the model lacks."""
        return self._sides[layer, linear, side]

    def vector(self, layer: int, linear: str, name: VectorName) -> VectorRange:
        """The tiles of one vector of one linear. KeyError as in `side`."""
        return self._vectors[layer, linear, name]

    def column(self, layer: int, linear: str) -> int:
        """The index of one linear in ranks and scales. KeyError as in `side`."""
        return self._columns[layer, linear]

    def tiles_of(self, layer: int, linear: str, side: SideName, rank: int) -> Iterator[Tile]:
        """The tiles that a matrix of `rank` fills, by ascending index."""
        where = self.side(layer, linear, side)
        for rank_start in range(0, rank, self.rank_tile):
            first = where.first + rank_start // self.rank_tile * where.chunks
            rank_stop = min(rank_start + self.rank_tile, rank)
            for chunk in range(where.chunks):
                start = chunk * where.chunk_features
                stop = min(start + where.chunk_features, where.features)
                yield Tile(first + chunk, rank_start, rank_stop, start, stop)

    def tiles_of_vector(self, layer: int, linear: str, name: VectorName) -> Iterator[Tile]:
        """The tiles of a vector, by ascending index; each is one row."""
        where = self.vector(layer, linear, name)
        for chunk in range(where.chunks):
            start = chunk * where.chunk_features
            stop = min(start + where.chunk_features, where.features)
            yield Tile(where.first + chunk, 0, 1, start, stop)
