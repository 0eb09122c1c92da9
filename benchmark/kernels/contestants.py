"""Who applies LoRA to a batch: these kernels, both backends of SGLang 0.5.17, and plain torch.

SGLang's kernels read padded buffers, `[slots, slices * R, K]` and `[slots, N, R]`, here filled with
the matrices of the pool; R is the largest rank. Its batch descriptions are built here as its
backends do (`srt/lora/backend/chunked_backend.py` and `triton_backend.py`), with grids of exactly
the segments of the batch; its captured graphs launch for the most that they allow, so this favours
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from synthetic import Projection, SyntheticPool

from graft_kernels.sgmv.device import DeviceSgmv

SCALE = 2.0
"""Of all adapters of a SyntheticPool."""


@dataclass(frozen=True)
class Batch:
    """Request i is the next `lengths[i]` rows, of the adapter in `slots[i]` (from 1 on)."""

    slots: tuple[int, ...]
    lengths: tuple[int, ...]
    decode: bool

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def of_row(self) -> list[int]:
        """The slot of each row."""
        pairs = zip(self.slots, self.lengths, strict=True)
        return [slot for slot, rows in pairs for _ in range(rows)]


@dataclass(frozen=True)
class Segments:
    """Rows `order[starts[i] : starts[i + 1]]` have the adapter `adapters[i]` (from 0 on).

    `order` is None where the rows of each segment adjoin.   longest: rows of a segment that the
    kernels prepare for.
    """

    adapters: list[int]
    starts: list[int]
    longest: int
    order: list[int] | None


def chunk_rows(tokens: int, most: int) -> int:
    """Rows of a chunk of csgmv; `most` is --max-lora-chunk-size, which is 16 unless set."""
    if most <= 16:
        return 16
    return min(most, 128 if tokens >= 256 else 32 if tokens >= 64 else 16)


def chunked(batch: Batch, most: int) -> Segments:
    """Rows sorted by adapter, in chunks: csgmv."""
    of_row, rows = batch.of_row, chunk_rows(batch.tokens, most)
    order = sorted(range(len(of_row)), key=of_row.__getitem__)
    adapters, starts = [], [0]
    for slot in sorted(set(of_row)):
        left = of_row.count(slot)
        while left:
            adapters.append(slot - 1)
            starts.append(starts[-1] + min(rows, left))
            left -= min(rows, left)
    return Segments(adapters, starts, rows, order)


def whole(batch: Batch, adapters: int) -> Segments:
    """The triton backend: a segment for each adapter in decode, for each request in prefill."""
    if not batch.decode:
        slots = [slot - 1 for slot in batch.slots]
        return Segments(slots, [0, *accumulate(batch.lengths)], max(batch.lengths), None)
    of_row = batch.of_row
    order = sorted(range(len(of_row)), key=of_row.__getitem__)
    counts = [of_row.count(slot) for slot in range(1, adapters + 1)]
    return Segments(list(range(adapters)), [0, *accumulate(counts)], len(of_row), order)


def batch_info(segments: Segments, ranks: Sequence[int], device: torch.device) -> Any:
    """SGLang's own description of the batch."""
    from sglang.srt.lora.utils import LoRABatchInfo

    def numbers(values: Sequence[float], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    count, starts = len(segments.adapters), numbers(segments.starts)
    return LoRABatchInfo(
        use_cuda_graph=False,
        bs=count,
        num_segments=count,
        seg_indptr=starts,
        weight_indices=numbers(segments.adapters),
        lora_ranks=numbers(ranks),
        scalings=numbers([SCALE] * len(ranks), torch.float32),
        max_len=segments.longest,
        seg_lens=starts.diff(),
        permutation=None if segments.order is None else numbers(segments.order),
    )


class Contestant(Protocol):
    def describe(self, batch: Batch) -> None:
        """Set the batch; not timed."""

    def apply(self, layer: int, projection: Projection, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the deltas of `x` `[T, K]` to `out` `[T, N]`."""


class Graft:
    def __init__(self, pool: SyntheticPool, tokens: int) -> None:
        self.pool = pool
        slices = [pieces for layer in pool.slices for pieces in layer.values()]
        self.kernels = DeviceSgmv(pool.weights, slices, pool.max_rank, min(tokens, 256), tokens)

    def describe(self, batch: Batch) -> None:
        self.kernels.describe(batch.slots, batch.lengths, self.pool.rank_tiles, decode=batch.decode)

    def apply(self, layer: int, projection: Projection, x: torch.Tensor, out: torch.Tensor) -> None:
        self.kernels.apply(x, self.pool.slices[layer][projection.name], out)


Padded = tuple[torch.Tensor, torch.Tensor]
"""A [slots, slices * R, K] and B [slots, N, R] of one projection of one layer."""


def padded(pool: SyntheticPool, layer: int, projection: Projection) -> Padded:
    """The pool's matrices as SGLang lays them out: the slices of A adjoin at the true rank."""
    pieces, count, most = pool.slices[layer][projection.name], len(pool.ranks), pool.max_rank
    device, dtype = pool.weights.arena.device, pool.dtype
    shape = count, len(pieces) * most, projection.inputs
    a = torch.zeros(shape, dtype=dtype, device=device)
    b = torch.zeros(count, sum(projection.widths), most, dtype=dtype, device=device)
    for index, rank in enumerate(pool.ranks):
        for i, piece in enumerate(pieces):
            end = piece.out_offset + piece.b.features
            a[index, i * rank : (i + 1) * rank] = pool.matrix(piece.a, index + 1)
            b[index, piece.out_offset : end, :rank] = pool.matrix(piece.b, index + 1).T
    return a, b


class Buffers:
    """Padded buffers of all layers; both backends of SGLang read the same."""

    def __init__(self, pool: SyntheticPool) -> None:
        self.pool = pool
        self.of = [
            {projection.name: padded(pool, layer, projection) for projection in pool.projections}
            for layer in range(pool.layers)
        ]
        self.offsets = {
            projection.name: torch.tensor(
                [0, *accumulate(projection.widths)],
                dtype=torch.int32,
                device=pool.weights.arena.device,
            )
            for projection in pool.projections
        }


class Csgmv:
    def __init__(self, buffers: Buffers, most: int) -> None:
        self.buffers, self.most = buffers, most

    def describe(self, batch: Batch) -> None:
        pool = self.buffers.pool
        self.info = batch_info(chunked(batch, self.most), pool.ranks, pool.weights.arena.device)

    def apply(self, layer: int, projection: Projection, x: torch.Tensor, out: torch.Tensor) -> None:
        from sglang.kernels.ops.gemm.chunked_sgmv_expand import chunked_sgmv_lora_expand_forward
        from sglang.kernels.ops.gemm.chunked_sgmv_shrink import chunked_sgmv_lora_shrink_forward

        a, b = self.buffers.of[layer][projection.name]
        s = chunked_sgmv_lora_shrink_forward(
            x=x, weights=a, batch_info=self.info, num_slices=len(projection.widths)
        )
        chunked_sgmv_lora_expand_forward(
            x=s,
            weights=b,
            batch_info=self.info,
            slice_offsets=self.buffers.offsets[projection.name],
            max_slice_size=max(projection.widths),
            base_output=out,
        )


class TritonBackend:
    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers

    def describe(self, batch: Batch) -> None:
        pool = self.buffers.pool
        segments = whole(batch, len(pool.ranks))
        self.info = batch_info(segments, pool.ranks, pool.weights.arena.device)

    def apply(self, layer: int, projection: Projection, x: torch.Tensor, out: torch.Tensor) -> None:
        from sglang.kernels.ops.gemm.gate_up_lora_b import gate_up_lora_b_fwd
        from sglang.kernels.ops.gemm.qkv_lora_b import qkv_lora_b_fwd
        from sglang.kernels.ops.gemm.sgemm_lora_a import sgemm_lora_a_fwd
        from sglang.kernels.ops.gemm.sgemm_lora_b import sgemm_lora_b_fwd

        a, b = self.buffers.of[layer][projection.name]
        widths = projection.widths
        s = sgemm_lora_a_fwd(x, a, self.info, stack_num=len(widths))
        if len(widths) == 1:
            sgemm_lora_b_fwd(s, b, self.info, out)
        elif len(widths) == 2:
            gate_up_lora_b_fwd(s, b, self.info, widths[0], out)
        else:
            offsets = self.buffers.offsets[projection.name]
            qkv_lora_b_fwd(s, b, self.info, offsets, max(widths), out)


class Torch:
    """One adapter and one linear after the other, in the dtype of the weights."""

    def __init__(self, pool: SyntheticPool) -> None:
        self.pool = pool
        self.of = [
            {
                projection.name: [
                    [
                        tuple(pool.matrix(side, slot).to(pool.dtype) for side in (piece.a, piece.b))
                        for piece in pool.slices[layer][projection.name]
                    ]
                    for slot in range(1, len(pool.ranks) + 1)
                ]
                for projection in pool.projections
            }
            for layer in range(pool.layers)
        ]

    def describe(self, batch: Batch) -> None:
        of_row = torch.tensor(batch.of_row, device=self.pool.weights.arena.device)
        self.rows = [(slot, (of_row == slot).nonzero()[:, 0]) for slot in sorted(set(batch.slots))]

    def apply(self, layer: int, projection: Projection, x: torch.Tensor, out: torch.Tensor) -> None:
        pieces = self.pool.slices[layer][projection.name]
        for slot, rows in self.rows:
            mine = x.index_select(0, rows)
            matrices = self.of[layer][projection.name][slot - 1]
            for piece, (a, b) in zip(pieces, matrices, strict=True):
                columns = out[:, piece.out_offset : piece.out_offset + piece.b.features]
                columns.index_add_(0, rows, (mine @ a.T) @ b, alpha=SCALE)
