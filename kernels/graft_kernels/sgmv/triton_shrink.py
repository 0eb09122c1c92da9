"""x @ A.T in Triton, with A read where it lies in the pool, tile by tile through its address."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from graft_kernels.sgmv.api import Slice, Weights
from graft_kernels.sgmv.dispatch import Shrink
from graft_kernels.sgmv.plan import Plan
from graft_kernels.sgmv.triton_common import DTYPES, RANK_TILE, alignment, pick, three


# What differs between layers and batches shall not be compiled in: else each compiles anew.
@triton.jit(
    do_not_specialize=[
        *("address_stride", "rank_stride", "max_items", "partial_rows"),
        *("a0", "a1", "a2", "c0", "c1", "c2"),
    ]
)
def _shrink(
    x,
    x_stride,
    addresses,
    address_stride,
    ranks,
    rank_stride,
    items,
    max_items,
    rows,
    partial,
    partial_rows,
    a0,
    a1,
    a2,
    c0,
    c1,
    c2,
    K: tl.constexpr,
    R: tl.constexpr,
    SLICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN_K: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """partial[split, slice, position, rank] = x[rows] @ A.T over one split of the features.

    The columns of one product are the ranks of one tile of every slice, so that x is read once.
    """
    split = tl.program_id(0)
    item = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    c = tl.arange(0, COLUMNS)
    slice_of = c // 16
    in_tile = c % 16
    column = pick(slice_of, c0, c1, c2)
    steps: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)
    # Loads that do not depend on each other stand together, before the branches that do: a small
    # batch costs little but the waits for memory, and these wait side by side.
    slot = tl.load(items + item * 4).to(tl.int64)
    first = tl.load(items + item * 4 + 1)
    count = tl.load(items + item * 4 + 2)
    tile = tl.load(items + item * 4 + 3)
    while count > 0:
        row = tl.load(rows + first + m, mask=m < count, other=0).to(tl.int64)
        rank = tl.load(ranks + slot * rank_stride + column, mask=slice_of < SLICES, other=0)
        table = addresses + slot * address_stride + pick(slice_of, a0, a1, a2)
        address = tl.load(table + tile, mask=slice_of < SLICES, other=0)
        r = tile * 16 + in_tile
        there = r < rank
        a_rows = (address + in_tile * (K * ITEMSIZE)).to(tl.pointer_type(DTYPE))
        a_rows = tl.multiple_of(a_rows, ALIGN_K)
        x_rows = x + row * x_stride
        acc = tl.zeros([BLOCK_M, COLUMNS], dtype=tl.float32)
        for step in tl.range(steps, num_stages=STAGES):
            k = (split * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)
            x_mask = (m < count)[:, None] & (k < K)[None, :]
            xs = tl.load(x_rows[:, None] + k[None, :], mask=x_mask, other=0)
            a_mask = there[None, :] & (k < K)[:, None]
            a = tl.load(a_rows[None, :] + k[:, None], mask=a_mask, other=0)
            acc = tl.dot(xs, a, acc, input_precision="ieee")
        base = (split * SLICES + slice_of).to(tl.int64) * partial_rows
        target = partial + (base[None, :] + (first + m)[:, None]) * R + r[None, :]
        # Ranks that the adapter lacks are stored too: whole lines are quicker, and nobody reads it.
        tl.store(target, acc, mask=(m < count)[:, None] & (slice_of < SLICES)[None, :])
        item += tl.num_programs(1)
        slot = tl.load(items + item * 4, mask=item < max_items, other=0).to(tl.int64)
        first = tl.load(items + item * 4 + 1, mask=item < max_items, other=0)
        count = tl.load(items + item * 4 + 2, mask=item < max_items, other=0)
        tile = tl.load(items + item * 4 + 3, mask=item < max_items, other=0)


def shrink(
    x: torch.Tensor,
    slices: Sequence[Slice],
    plan: Plan,
    weights: Weights,
    partial: torch.Tensor,
    config: Shrink,
) -> None:
    """Partial sums of `x` `[T, K]` into `partial` float32 `[splits, S, T, R]`, by row position."""
    tokens, features = x.shape
    splits, _, partial_rows, ranks = partial.shape
    itemsize = x.element_size()
    programs = min(plan.max_items, plan.blocks_for(tokens))
    _shrink[(splits, programs)](
        x,
        x.stride(0),
        weights.addresses,
        weights.addresses.stride(0),
        weights.ranks,
        weights.ranks.stride(0),
        plan.items,
        plan.max_items,
        plan.rows,
        partial,
        partial_rows,
        *three(piece.a.first for piece in slices),
        *three(piece.column for piece in slices),
        K=features,
        R=ranks,
        SLICES=len(slices),
        COLUMNS=RANK_TILE * triton.next_power_of_2(len(slices)),
        SPLITS=splits,
        BLOCK_M=plan.shape.block_rows,
        BLOCK_K=config.block_k,
        ALIGN_K=alignment(features * itemsize),
        ITEMSIZE=itemsize,
        DTYPE=DTYPES[x.dtype],
        STAGES=config.stages,
        num_warps=config.warps,
    )
