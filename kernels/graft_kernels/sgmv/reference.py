"""Segmented LoRA in plain torch: the oracle of the kernel tests, and what serves on CPU.

All sums and products run in the dtype of the input, in the order in which PEFT applies a LoRA
layer: `out + ((x @ A.T) @ B.T) * scale`. Float64 inputs widen the weights, so that the result is
exact to float64. For adapters with vectors, `(out + delta) * mul + add` runs in float32 at least.
"""

from collections.abc import Iterator, Sequence

import torch

from graft_kernels import tiles
from graft_kernels.sgmv.api import Group, Side, Slice, Vector, Weights


class TileReader:
    """Reads the matrices of adapters out of the arena, without a copy where their tiles adjoin."""

    def __init__(self, weights: Weights) -> None:
        # Numpy shares the memory of the tables and reads one entry some ten times quicker.
        self._addresses = weights.addresses.numpy()
        self._arena = weights.arena
        self._numbers = weights.arena.view(weights.dtype)
        self._itemsize = weights.dtype.itemsize
        self._rank_tile = weights.rank_tile

    def matrix(self, side: Side, slot: int, rank: int) -> torch.Tensor:
        """A `[rank, in]` or B.T `[rank, out]` of one adapter. Shares memory where it can."""
        if side.chunks == 1:
            return _joined(
                [self._tile(*run, side.features) for run in self._runs(side, slot, rank)]
            )
        bands = []
        for first_rank in range(0, rank, self._rank_tile):
            ranks = min(self._rank_tile, rank - first_rank)
            bands.append(self._band(side, slot, first_rank // self._rank_tile, ranks))
        return _joined(bands)

    def vector(self, vector: Vector | None, slot: int) -> torch.Tensor | None:
        """The float32 values `[features]` of one adapter, None where it has none."""
        if vector is None:
            return None
        columns = slice(vector.first, vector.first + vector.chunks)
        addresses = self._addresses[slot, columns].tolist()
        if not any(addresses):
            return None
        assert all(addresses), f"slot {slot} has a part of {vector}: {addresses}"
        numbers = self._arena.view(torch.float32)
        parts = []
        for chunk, address in enumerate(addresses):
            width = min(vector.chunk_features, vector.features - chunk * vector.chunk_features)
            parts.append(tiles.read(numbers, address, width))
        return _joined(parts)

    def _runs(self, side: Side, slot: int, rank: int) -> Iterator[tuple[int, int]]:
        """(address, ranks) of the tiles; those that follow each other in memory count as one."""
        start, ranks, row_bytes = 0, 0, side.features * self._itemsize
        for tile in range(-(-rank // self._rank_tile)):
            address = self._address(side, slot, tile)
            if address != start + ranks * row_bytes:
                if ranks:
                    yield start, ranks
                start, ranks = address, 0
            ranks += min(self._rank_tile, rank - tile * self._rank_tile)
        yield start, ranks

    def _band(self, side: Side, slot: int, rank_tile: int, ranks: int) -> torch.Tensor:
        """One rank tile whose features are split into chunks: `[ranks, features]`, copied."""
        parts = []
        for chunk in range(side.chunks):
            features = min(side.chunk_features, side.features - chunk * side.chunk_features)
            address = self._address(side, slot, rank_tile * side.chunks + chunk)
            parts.append(self._tile(address, ranks, features))
        return torch.cat(parts, dim=1)

    def _address(self, side: Side, slot: int, tile: int) -> int:
        assert tile < side.rank_tiles * side.chunks, f"tile {tile} is beyond those of {side}"
        address = int(self._addresses[slot, side.first + tile])
        assert address, f"slot {slot} has a rank for an absent tile {side.first + tile}"
        return address

    def _tile(self, address: int, ranks: int, features: int) -> torch.Tensor:
        return tiles.read(self._numbers, address, ranks * features).view(ranks, features)


def shrink(
    x: torch.Tensor, slices: Sequence[Slice], groups: Sequence[Group], weights: Weights
) -> torch.Tensor:
    """See `api.shrink`."""
    reader = TileReader(weights)
    work = _work(slices, groups, weights)
    largest = max((rank for _, ranks in work for rank in ranks), default=0)
    s = x.new_zeros(x.shape[0], len(slices), largest)
    for group, ranks in work:
        mine, taken = _take(x, group.rows), _take(s, group.rows)
        for index, (piece, rank) in enumerate(zip(slices, ranks, strict=True)):
            if rank:
                a = reader.matrix(piece.a, group.slot, rank).to(x.dtype)
                taken[:, index, :rank] = mine @ a.T
        _put_back(s, group.rows, taken)
    return s


def expand(
    s: torch.Tensor,
    slices: Sequence[Slice],
    groups: Sequence[Group],
    weights: Weights,
    out: torch.Tensor,
) -> torch.Tensor:
    """See `api.expand`."""
    reader, scales = TileReader(weights), weights.scales.numpy()
    for group, ranks in _work(slices, groups, weights):
        assert max(ranks) <= s.shape[2], f"slot {group.slot}: ranks {ranks} in s {list(s.shape)}"
        mine, taken = _take(s, group.rows), _take(out, group.rows)
        for index, (piece, rank) in enumerate(zip(slices, ranks, strict=True)):
            if rank:
                b = reader.matrix(piece.b, group.slot, rank).to(s.dtype)
                delta = mine[:, index, :rank] @ b
                delta *= float(scales[group.slot, piece.column])
                columns = taken[:, piece.out_offset : piece.out_offset + piece.b.features]
                mul = reader.vector(piece.mul, group.slot)
                add = reader.vector(piece.add, group.slot)
                if mul is None and add is None:
                    columns.add_(delta)
                else:
                    columns.copy_(_with_vectors(columns, delta, mul, add))
        _put_back(out, group.rows, taken)
    return out


def _with_vectors(
    out: torch.Tensor, delta: torch.Tensor, mul: torch.Tensor | None, add: torch.Tensor | None
) -> torch.Tensor:
    """`(out + delta) * mul + add`, one rounding to the dtype of `out` left to the caller."""
    wide = torch.promote_types(out.dtype, torch.float32)
    result = out.to(wide) + delta.to(wide)
    if mul is not None:
        result *= mul.to(wide)
    if add is not None:
        result += add.to(wide)
    return result


def _work(
    slices: Sequence[Slice], groups: Sequence[Group], weights: Weights
) -> list[tuple[Group, list[int]]]:
    """The groups that have a rank on any slice, each with its rank on every slice."""
    table = weights.ranks.numpy()
    columns = [piece.column for piece in slices]
    work = [(group, table[group.slot, columns].tolist()) for group in groups]
    return [(group, ranks) for group, ranks in work if any(ranks)]


def _take(tensor: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """A view of a slice of rows, a copy of rows by number."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _put_back(tensor: torch.Tensor, rows: slice | torch.Tensor, taken: torch.Tensor) -> None:
    # Moving whole rows twice beats one indexed add of a few columns several times on CPU.
    if not isinstance(rows, slice):
        tensor.index_copy_(0, rows, taken)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
