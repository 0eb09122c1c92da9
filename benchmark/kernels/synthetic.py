"""A pool of random adapters for a model's shape: tiles where a server would have them."""

from dataclasses import dataclass, field

import torch

from graft_kernels.sgmv import Side, Slice, Vector, Weights

RANK_TILE = 16
ALIGNMENT = 128


@dataclass(frozen=True)
class Projection:
    """One (perhaps stacked) linear of each layer: `[T, inputs] -> [T, sum(widths)]`."""

    name: str
    inputs: int
    widths: tuple[int, ...]


LLAMA_8B = (
    Projection("qkv", 4096, (4096, 1024, 1024)),
    Projection("o", 4096, (4096,)),
    Projection("gate_up", 4096, (14336, 14336)),
    Projection("down", 14336, (4096,)),
)


@dataclass
class SyntheticPool:
    """Adapters of the given ranks, one a slot from 1 on, with scattered tiles in one arena.

    `slices[layer][projection name]` are what a layer hands to the kernels. Values are drawn so
    that a delta has about a hundredth of the size of the base output.
    """

    projections: tuple[Projection, ...]
    layers: int
    ranks: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    max_rank: int = 256
    start: int = 0
    slices: list[dict[str, tuple[Slice, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        columns, tiles = 0, 0
        for _ in range(self.layers):
            layer = {}
            for projection in self.projections:
                offset, found = 0, []
                for width in projection.widths:
                    a, tiles = self._side(tiles, projection.inputs)
                    b, tiles = self._side(tiles, width)
                    vectors = [Vector(tiles + i, 1, width, width) for i in (0, 1)]
                    found.append(Slice(a, b, columns, offset, *vectors))
                    tiles, columns, offset = tiles + 2, columns + 1, offset + width
                layer[projection.name] = tuple(found)
            self.slices.append(layer)
        self._place(columns, tiles)

    def _side(self, first: int, features: int) -> tuple[Side, int]:
        count = -(-self.max_rank // RANK_TILE)
        return Side(first, count, 1, features, features), first + count

    def _place(self, columns: int, tiles: int) -> None:
        slots = len(self.ranks) + 1
        offsets = torch.full((slots, tiles), -1, dtype=torch.int64)
        ranks = torch.zeros(slots, columns, dtype=torch.int32)
        scales = torch.zeros(slots, columns, dtype=torch.float32)
        end, itemsize = self.start, self.dtype.itemsize
        for slot, rank in enumerate(self.ranks, start=1):
            ranks[slot], scales[slot] = rank, 2.0
            for layer in self.slices:
                for piece in (piece for pieces in layer.values() for piece in pieces):
                    for side in (piece.a, piece.b):
                        for tile in range(-(-rank // RANK_TILE)):
                            held = min(RANK_TILE, rank - tile * RANK_TILE)
                            offsets[slot, side.first + tile] = end
                            size = held * side.features * itemsize
                            end += -(-size // ALIGNMENT) * ALIGNMENT
        arena = torch.empty(end + ALIGNMENT, dtype=torch.uint8, device=self.device)
        arena[self.start :].view(self.dtype).normal_(std=0.02)
        addresses = torch.where(offsets < 0, 0, offsets + arena.data_ptr())
        self.nbytes = end - self.start
        self.weights = Weights(
            addresses=addresses.to(self.device),
            ranks=ranks.to(self.device),
            scales=scales.to(self.device),
            arena=arena,
            dtype=self.dtype,
        )
        self._offsets = offsets
        self.rank_tiles = ((ranks.amax(1) + RANK_TILE - 1) // RANK_TILE).numpy()

    def matrix(self, side: Side, slot: int) -> torch.Tensor:
        """A `[r, in]` or B.T `[r, out]` of a slot, float64 on the CPU."""
        rank = self.ranks[slot - 1]
        bands = []
        for tile in range(-(-rank // RANK_TILE)):
            held = min(RANK_TILE, rank - tile * RANK_TILE)
            start = int(self._offsets[slot, side.first + tile])
            size = held * side.features * self.dtype.itemsize
            raw = self.weights.arena[start : start + size].view(self.dtype)
            bands.append(raw.view(held, side.features))
        return torch.cat(bands).double()

    def dense(
        self, x: torch.Tensor, pieces: tuple[Slice, ...], slots: list[int], base: torch.Tensor
    ) -> torch.Tensor:
        """The exact result in float64, for rows whose adapters are `slots`."""
        out, of_row = base.double(), torch.tensor(slots, device=x.device)
        for slot in sorted(set(slots) - {0}):
            rows = (of_row == slot).nonzero()[:, 0]
            for piece in pieces:
                a, b = self.matrix(piece.a, slot), self.matrix(piece.b, slot)
                delta = (x[rows].double() @ a.T) @ b * 2.0
                out[rows, piece.out_offset : piece.out_offset + piece.b.features] += delta
        return out
