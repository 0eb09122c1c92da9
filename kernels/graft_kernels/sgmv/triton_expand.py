"""(x @ A.T) @ B.T into the base output in Triton, with B read where it lies in the pool."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from graft_kernels.sgmv.api import Slice, Weights
from graft_kernels.sgmv.dispatch import Expand
from graft_kernels.sgmv.plan import Plan
from graft_kernels.sgmv.triton_common import DTYPES, alignment, pick, three


@triton.jit
def _shrunk(
    partial,
    partial_rows,
    index,
    first,
    count,
    r,
    rank,
    R: tl.constexpr,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The shrunk rows at ranks `r`, `[BLOCK_M, len(r)]`, zero beyond the rank."""
    m = tl.arange(0, BLOCK_M)
    # Up to whole tiles, as a mask by the rank itself would split the loads.
    mask = (m < count)[:, None] & (r < (rank + 15) // 16 * 16)[None, :]
    at = partial + (index.to(tl.int64) * partial_rows + (first + m)[:, None]) * R + r[None, :]
    total = tl.load(at, mask=mask, other=0)
    for _ in tl.static_range(1, SPLITS):
        at += partial_rows.to(tl.int64) * (SLICES * R)
        total += tl.load(at, mask=mask, other=0)
    return tl.where((r < rank)[None, :], total, 0).to(DTYPE)


@triton.jit
def _b_tile(rows, r, rank, n, width):
    """B.T at ranks `r` (whose rows start at `rows`) and outputs `n`, zero beyond the rank."""
    return tl.load(
        rows[:, None] + n[None, :], mask=(r < rank)[:, None] & (n < width)[None, :], other=0
    )


@triton.jit
def _b_rows(table, r, rank, width, DTYPE: tl.constexpr):
    """Where rows `r` of B.T start, each in its tile; aligned as whole tiles and rows are."""
    address = tl.load(table + r // 16, mask=r < rank, other=0)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + (r % 16) * width


@triton.jit
def _finish(
    target, mask, before, delta, mul, add, n, width, DTYPE: tl.constexpr, VECTORS: tl.constexpr
):
    """Store (before + delta) * mul + add, each vector only if it has an address."""
    after = before.to(tl.float32) + delta
    if VECTORS:
        if mul != 0:
            factors = mul.to(tl.pointer_type(tl.float32)) + n
            after *= tl.load(factors, mask=n < width, other=1)[None, :]
        if add != 0:
            terms = add.to(tl.pointer_type(tl.float32)) + n
            after += tl.load(terms, mask=n < width, other=0)[None, :]
    tl.store(target, after.to(DTYPE), mask=mask)


# What differs between layers and batches shall not be compiled in: else each compiles anew.
@triton.jit(
    do_not_specialize=[
        *("address_stride", "rank_stride", "partial_rows"),
        *("b0", "b1", "b2", "c0", "c1", "c2"),
        *("mul0", "mul1", "mul2", "add0", "add1", "add2"),
    ]
)
def _expand(
    partial,
    partial_rows,
    out,
    out_stride,
    addresses,
    address_stride,
    ranks,
    scales,
    rank_stride,
    parts,
    rows,
    b0,
    b1,
    b2,
    c0,
    c1,
    c2,
    mul0,
    mul1,
    mul2,
    add0,
    add1,
    add2,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    O0: tl.constexpr,
    O1: tl.constexpr,
    O2: tl.constexpr,
    R: tl.constexpr,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    VECTORS: tl.constexpr,
    ALIGN_N: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
    WIDER: tl.constexpr,
    WIDE_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[rows, slice] = (out + (sum of partials) @ B.T * scale) * mul + add.

    A part of a block takes `steps` pieces of BLOCK_N outputs; no piece spans two slices.
    """
    entry = parts + tl.program_id(0) * 8
    slot = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1)
    count = tl.load(entry + 2)
    part = tl.load(entry + 3)
    parts_of_block = tl.load(entry + 4)
    pieces0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    pieces1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    pieces2: tl.constexpr = (N2 + BLOCK_N - 1) // BLOCK_N
    total: tl.constexpr = pieces0 + pieces1 + pieces2
    if count == 0:
        if OVERLAP:
            gdc_wait()
        return
    each = (total + parts_of_block - 1) // parts_of_block
    piece = part * each
    end = tl.minimum(piece + each, total)
    m = tl.arange(0, BLOCK_M)
    row = tl.load(rows + first + m, mask=m < count, other=0).to(tl.int64)
    while piece < end:
        # The pieces of one slice are one run: one rank, one scale, one set of shrunk rows.
        index = (piece >= pieces0).to(tl.int32) + (piece >= pieces0 + pieces1).to(tl.int32)
        before_slice = pick(index, 0, pieces0, pieces0 + pieces1)
        run_end = tl.minimum(end, before_slice + pick(index, pieces0, pieces1, pieces2))
        width = tl.multiple_of(pick(index, N0, N1, N2), ALIGN_N)
        offset = tl.multiple_of(pick(index, O0, O1, O2), ALIGN_N)
        column = pick(index, c0, c1, c2)
        table = addresses + slot * address_stride
        rank = tl.load(ranks + slot * rank_stride + column)
        scale = tl.load(scales + slot * rank_stride + column)
        mul = tl.load(table + pick(index, mul0, mul1, mul2), mask=VECTORS, other=0)
        add = tl.load(table + pick(index, add0, add1, add2), mask=VECTORS, other=0)
        tiles = table + pick(index, b0, b1, b2)
        r = tl.arange(0, 16)
        # Read before the rank is known, as absent tiles have an address too, which is zero.
        address = tl.load(tiles).to(tl.pointer_type(DTYPE))
        b_rows = tl.multiple_of(address, 16) + r * width
        out_rows = out + row[:, None] * out_stride + offset
        if (rank <= 16) & (run_end - piece == 1):
            # The usual part of a small batch: all that nobody writes meanwhile comes first.
            n = (piece - before_slice) * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = (m < count)[:, None] & (n < width)[None, :] & (rank > 0)
            b = _b_tile(b_rows, r, rank, n, width)
            if OVERLAP:
                gdc_wait()
            before = tl.load(out_rows + n[None, :], mask=mask, other=0)
            s = _shrunk(
                *(partial, partial_rows, index, first, count, r, rank),
                *(R, SLICES, SPLITS, BLOCK_M, DTYPE),
            )
            delta = tl.dot(s, b, input_precision="ieee") * scale
            _finish(
                *(out_rows + n[None, :], mask, before, delta, mul, add, n, width),
                *(DTYPE, VECTORS),
            )
        elif rank > WIDE:
            if OVERLAP:
                gdc_wait()
            # Rare: the shrunk rows are added up again for each piece.
            for at in tl.range(piece, run_end, num_stages=1):
                n = (at - before_slice) * BLOCK_N + tl.arange(0, BLOCK_N)
                mask = (m < count)[:, None] & (n < width)[None, :]
                before = tl.load(out_rows + n[None, :], mask=mask, other=0)
                delta = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
                for tile in tl.range(0, (rank + 15) // 16, num_stages=1):
                    some = tile * 16 + r
                    s = _shrunk(
                        *(partial, partial_rows, index, first, count, some, rank),
                        *(R, SLICES, SPLITS, BLOCK_M, DTYPE),
                    )
                    rows_of_tile = _b_rows(tiles, some, rank, width, DTYPE)
                    b = _b_tile(rows_of_tile, some, rank, n, width)
                    delta = tl.dot(s, b, delta, input_precision="ieee")
                _finish(
                    *(out_rows + n[None, :], mask, before, delta * scale, mul, add, n, width),
                    *(DTYPE, VECTORS),
                )
        elif rank > 16:
            if OVERLAP:
                gdc_wait()
            wide = tl.arange(0, WIDE)
            s = _shrunk(
                *(partial, partial_rows, index, first, count, wide, rank),
                *(R, SLICES, SPLITS, BLOCK_M, DTYPE),
            )
            wide_rows = _b_rows(tiles, wide, rank, width, DTYPE)
            # Smaller pieces, as B has more ranks here: as many numbers at a time.
            for at in tl.range(piece * WIDER, run_end * WIDER, num_stages=WIDE_STAGES):
                n = (at - before_slice * WIDER) * (BLOCK_N // WIDER)
                n += tl.arange(0, BLOCK_N // WIDER)
                mask = (m < count)[:, None] & (n < width)[None, :]
                before = tl.load(out_rows + n[None, :], mask=mask, other=0)
                b = _b_tile(wide_rows, wide, rank, n, width)
                delta = tl.dot(s, b, input_precision="ieee") * scale
                _finish(
                    *(out_rows + n[None, :], mask, before, delta, mul, add, n, width),
                    *(DTYPE, VECTORS),
                )
        elif rank > 0:
            if OVERLAP:
                gdc_wait()
            s = _shrunk(
                *(partial, partial_rows, index, first, count, r, rank),
                *(R, SLICES, SPLITS, BLOCK_M, DTYPE),
            )
            for at in tl.range(piece, run_end, num_stages=STAGES):
                n = (at - before_slice) * BLOCK_N + tl.arange(0, BLOCK_N)
                mask = (m < count)[:, None] & (n < width)[None, :]
                before = tl.load(out_rows + n[None, :], mask=mask, other=0)
                b = _b_tile(b_rows, r, rank, n, width)
                delta = tl.dot(s, b, input_precision="ieee") * scale
                _finish(
                    *(out_rows + n[None, :], mask, before, delta, mul, add, n, width),
                    *(DTYPE, VECTORS),
                )
        piece = run_end
    if OVERLAP:
        # Who comes after this launch relies on all that came before it, too.
        gdc_wait()


def expand(
    partial: torch.Tensor,
    slices: Sequence[Slice],
    plan: Plan,
    weights: Weights,
    out: torch.Tensor,
    config: Expand,
) -> None:
    """Add the deltas of `partial`, as `shrink` left it, to `out` `[T, N]` in place."""
    widths = [piece.b.features for piece in slices]
    offsets = [piece.out_offset for piece in slices]
    splits, _, partial_rows, ranks = partial.shape
    _expand[(plan.parts_for(out.shape[0]),)](
        partial,
        partial_rows,
        out,
        out.stride(0),
        weights.addresses,
        weights.addresses.stride(0),
        weights.ranks,
        weights.scales,
        weights.ranks.stride(0),
        plan.parts,
        plan.rows,
        *three(piece.b.first for piece in slices),
        *three(piece.column for piece in slices),
        *three(piece.mul.first if piece.mul else 0 for piece in slices),
        *three(piece.add.first if piece.add else 0 for piece in slices),
        *three(widths),
        *three(offsets),
        R=ranks,
        SLICES=len(slices),
        SPLITS=splits,
        BLOCK_M=plan.shape.block_rows,
        BLOCK_N=config.block_n,
        WIDE=config.wide,
        VECTORS=any(piece.mul or piece.add for piece in slices),
        ALIGN_N=alignment(*widths, *offsets),
        DTYPE=DTYPES[out.dtype],
        STAGES=config.stages,
        WIDER=config.wider,
        WIDE_STAGES=config.wide_stages,
        OVERLAP=config.overlap,
        num_warps=config.warps,
        launch_pdl=config.overlap,
        maxnreg=config.registers,
    )
