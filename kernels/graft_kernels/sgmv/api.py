"""What segmented LoRA computes, and the checks of its input. How it computes is `reference`.

Shapes: T tokens, K input features, N output features, S slices, R the largest rank in use.

    s[t, i, :r]       = x[t] @ A_i.T                shrink
    out[t, columns_i] += (s[t, i, :r] @ B_i.T) * scale_i    expand

A_i `[r, K]` and B_i `[n, r]` belong to the adapter in the slot of token t, each at its true rank r.
An adapter may also have vectors over the outputs of a slice. Then, where its rank there is above 0,

    out[t, columns_i] = (out[t, columns_i] + delta) * mul_i + add_i

in float32 (float64 for float64 input), each of the two only if it is present. DoRA (Liu et al.,
2024) and biases of LoRA layers come to this.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Side:
    """Where the tiles of one matrix (A or B of one linear) stand in the pointer table.

    A tile is up to `rank_tile` ranks by up to `chunk_features` features, rank-major and contiguous
    (so B lies transposed). Tile (rank tile i, chunk j) is column `first + i * chunks + j`. An
    adapter of rank r uses the first ceil(r / rank_tile) of the `rank_tiles` rank tiles. The last of
    those holds only the ranks that are left, and a last chunk only the features that are left.
    """

    first: int
    rank_tiles: int
    chunks: int
    chunk_features: int
    features: int


@dataclass(frozen=True, slots=True)
class Vector:
    """float32 values over the output features of one linear, one for each.

    Chunk j is column `first + j` of the address table, each chunk contiguous, up to
    `chunk_features` values. An adapter has all chunks or none.
    """

    first: int
    chunks: int
    chunk_features: int
    features: int


@dataclass(frozen=True, slots=True)
class Slice:
    """One linear of a stacked projection, as q of qkv; a projection of its own is one slice.

    `column` finds its rank and scale, `out_offset` is its first output feature. `mul` and `add` say
    where an adapter's vectors stand; None where no adapter can have them.
    """

    a: Side
    b: Side
    column: int
    out_offset: int
    mul: Vector | None = None
    add: Vector | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All adapters on the device.

    `addresses` int64 `[slots, tiles]` point into `arena` (uint8 `[bytes]`), 0 where a tile is
    absent; `ranks` int32 and `scales` float32 `[slots, columns]`, rank 0 where an adapter does not
    touch a linear. `dtype` is that of the tiles. The reference wants the three tables on the host.
    Slot 0 is the base model: all zero.
    """

    addresses: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor
    arena: torch.Tensor
    dtype: torch.dtype
    rank_tile: int = 16

    def __post_init__(self) -> None:
        wanted = {
            "addresses": (torch.int64, 2),
            "ranks": (torch.int32, 2),
            "scales": (torch.float32, 2),
            "arena": (torch.uint8, 1),
        }
        for name, (dtype, dim) in wanted.items():
            got = getattr(self, name)
            if got.dtype != dtype or got.dim() != dim:
                raise ValueError(
                    f"Weights.{name}: wanted {dtype} of {dim} dimensions, "
                    f"got {got.dtype} {list(got.shape)}"
                )
        if self.ranks.shape != self.scales.shape or len(self.ranks) != len(self.addresses):
            raise ValueError(
                "Weights: wanted addresses [slots, tiles], ranks and scales [slots, columns], got "
                f"{list(self.addresses.shape)}, {list(self.ranks.shape)}, {list(self.scales.shape)}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The tokens of one adapter in this batch: a slice, or int64 `[n]` row numbers, each once.

    No token may be in two groups; tokens in no group have no adapter. May be empty.
    """

    slot: int
    rows: slice | torch.Tensor


def shrink(
    x: torch.Tensor, slices: Sequence[Slice], groups: Sequence[Group], weights: Weights
) -> torch.Tensor:
    """`x` `[T, K]` into a new `[T, S, R]` of its dtype, zero where an adapter has no weights."""
    from graft_kernels.sgmv import reference

    _check_matrix("x", x)
    for piece in slices:
        if piece.a.features != x.shape[1]:
            raise ValueError(f"x: wanted [T, {piece.a.features}], got {list(x.shape)}")
    return reference.shrink(x, slices, groups, weights)


def expand(
    s: torch.Tensor,
    slices: Sequence[Slice],
    groups: Sequence[Group],
    weights: Weights,
    out: torch.Tensor,
) -> torch.Tensor:
    """Add the deltas of `s` `[T, S, R]`, as `shrink` made it, to `out` `[T, N]` in place.

    Applies the vectors of the adapters that have any. Returns `out`. Rows of slot 0, rows in no
    group and slices where an adapter's rank is 0 keep their bits.
    """
    from graft_kernels.sgmv import reference

    _check_matrix("out", out)
    wanted = (out.shape[0], len(slices))
    if s.dim() != 3 or s.shape[:2] != wanted or s.dtype != out.dtype:
        raise ValueError(
            f"s: wanted {out.dtype} [{wanted[0]}, {wanted[1]}, R], got {s.dtype} {list(s.shape)}"
        )
    for piece in slices:
        end = piece.out_offset + piece.b.features
        if end > out.shape[1]:
            raise ValueError(f"out: wanted [T, at least {end}], got {list(out.shape)}")
        for vector in (piece.mul, piece.add):
            if vector is not None and vector.features != piece.b.features:
                raise ValueError(
                    f"slices: wanted vectors of {piece.b.features} features, got {vector}"
                )
    return reference.expand(s, slices, groups, weights, out)


def sgmv(
    x: torch.Tensor,
    slices: Sequence[Slice],
    groups: Sequence[Group],
    weights: Weights,
    out: torch.Tensor,
) -> torch.Tensor:
    """`shrink` and `expand`: applies each token's adapter for `x` `[T, K]` to `out` `[T, N]`."""
    return expand(shrink(x, slices, groups, weights), slices, groups, weights, out)


def _check_matrix(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 2 or not tensor.is_floating_point():
        raise ValueError(
            f"{name}: wanted a floating-point matrix, got {tensor.dtype} {list(tensor.shape)}"
        )
