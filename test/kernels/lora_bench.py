"""Random adapters in an arena in which all other bytes are NaN, and what they do in plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from graft_kernels.sgmv import Group, Side, Slice, Vector, Weights

RANK_TILE = 16
MAX_RANK = 64
ARENA_BYTES = 4 << 20
K = 48
WIDTHS = (40, 24, 24)  # the outputs of q, k and v
N = sum(WIDTHS)

Deltas = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, float]]
"""(slot, column) -> A [r, K], B [n, r], scale."""
Vectors = dict[tuple[int, int], dict[str, torch.Tensor]]
"""(slot, column) -> "mul" and "add", float32 [n], as far as the adapter has them."""


@dataclass
class Bench:
    """A stacked projection, a pointer table of `slots`, and an arena of tiles.

    `start`: bytes of the arena before the first tile.   `std`: of the entries of A.
    """

    slots: int
    dtype: torch.dtype = torch.float32
    chunk_features: int = 1 << 20
    gap: int = 128
    inputs: int = K
    widths: tuple[int, ...] = WIDTHS
    max_rank: int = MAX_RANK
    arena_bytes: int = ARENA_BYTES
    start: int = 0
    std: float = 1.0
    device: str = "cpu"
    deltas: Deltas = field(default_factory=dict)
    vectors: Vectors = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._end = self.start
        self._tiles = 0
        self.slices: list[Slice] = []
        for column, width in enumerate(self.widths):
            a, b = self._side(self.inputs), self._side(width)
            mul, add = self._vector(width), self._vector(width)
            self.slices.append(Slice(a, b, column, sum(self.widths[:column]), mul, add))
        shape, device = (self.slots, len(self.widths)), self.device
        self.weights = Weights(
            addresses=torch.zeros(self.slots, self._tiles, dtype=torch.int64, device=device),
            ranks=torch.zeros(shape, dtype=torch.int32, device=device),
            scales=torch.zeros(shape, dtype=torch.float32, device=device),
            arena=torch.full((self.arena_bytes,), 0xFF, dtype=torch.uint8, device=device),
            dtype=self.dtype,
        )

    def _side(self, features: int) -> Side:
        width = min(self.chunk_features, features)
        tiles = -(-self.max_rank // RANK_TILE)
        side = Side(self._tiles, tiles, -(-features // width), width, features)
        self._tiles += side.rank_tiles * side.chunks
        return side

    def _vector(self, features: int) -> Vector:
        width = min(self.chunk_features, features)
        vector = Vector(self._tiles, -(-features // width), width, features)
        self._tiles += vector.chunks
        return vector

    def load(self, slot: int, column: int, rank: int, *, value: float | None = None) -> None:
        """Put a random adapter (or one of a single value) of `rank` on one linear of a slot."""
        a = (torch.randn(rank, self.inputs) * self.std).to(self.device, self.dtype)
        b = torch.randn(self.widths[column], rank).to(self.device, self.dtype)
        if value is not None:
            a.fill_(value)
            b.fill_(value)
        scale = 2.0 ** ((slot - 1) % 4 - 1)
        self.deltas[slot, column] = a, b, scale
        self.weights.ranks[slot, column] = rank
        self.weights.scales[slot, column] = scale
        self._store(slot, self.slices[column].a, a)
        self._store(slot, self.slices[column].b, b.T)

    def load_all(self, slot: int, rank: int, *, value: float | None = None) -> None:
        """The same rank on all linears of a slot."""
        for column in range(len(self.widths)):
            self.load(slot, column, rank, value=value)

    def load_vector(self, slot: int, column: int, name: str) -> None:
        """Put a random "mul" or "add" on one linear of a slot."""
        values = (torch.randn(self.widths[column]) + 1).to(self.device)
        self.vectors.setdefault((slot, column), {})[name] = values
        where = getattr(self.slices[column], name)
        for j, part in enumerate(values.split(where.chunk_features)):
            self._put(slot, where.first + j, part)

    def _store(self, slot: int, side: Side, matrix: torch.Tensor) -> None:
        for i, band in enumerate(matrix.split(RANK_TILE)):
            for j, tile in enumerate(band.split(side.chunk_features, dim=1)):
                self._put(slot, side.first + i * side.chunks + j, tile)

    def _put(self, slot: int, tile: int, values: torch.Tensor) -> None:
        data = values.contiguous().view(torch.uint8).reshape(-1)
        assert self._end + len(data) <= self.arena_bytes, "arena_bytes is too small"
        self.weights.arena[self._end : self._end + len(data)] = data
        self.weights.addresses[slot, tile] = self.weights.arena.data_ptr() + self._end
        self._end += -(-len(data) // 128) * 128 + self.gap

    @property
    def rank_tiles(self) -> npt.NDArray[np.int32]:
        """Rank tiles of each slot's widest linear, `[slots]`."""
        found: npt.NDArray[np.int32] = (-(-self.weights.ranks.amax(1) // RANK_TILE)).cpu().numpy()
        return found

    def dense(self, x: torch.Tensor, groups: Sequence[Group], out: torch.Tensor) -> torch.Tensor:
        """The expected result, in the dtype of `x`, from plain matrices."""
        out = out.clone()
        for group in groups:
            for piece in self.slices:
                if (group.slot, piece.column) in self.deltas:
                    a, b, scale = self.deltas[group.slot, piece.column]
                    delta = x[group.rows] @ a.to(x.dtype).T @ b.to(x.dtype).T * scale
                    columns = slice(piece.out_offset, piece.out_offset + piece.b.features)
                    out[group.rows, columns] += delta
                    for name, values in self.vectors.get((group.slot, piece.column), {}).items():
                        wide = out[group.rows, columns].to(
                            torch.promote_types(x.dtype, values.dtype)
                        )
                        wide = wide * values if name == "mul" else wide + values
                        out[group.rows, columns] = wide.to(out.dtype)
        return out


def make_groups(slots: Sequence[int], device: str = "cpu") -> list[Group]:
    """Groups of row numbers from the slot of each row."""
    table = torch.tensor(slots, dtype=torch.int64, device=device)
    return [Group(slot, (table == slot).nonzero()[:, 0]) for slot in sorted(set(slots))]
