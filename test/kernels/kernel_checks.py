"""Batches for the Triton kernels, and checks of what they make of them."""

import os
from collections.abc import Sequence

import pytest
import torch
from lora_bench import Bench, make_groups

from graft_kernels.sgmv.device import DeviceSgmv

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED

DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if CUDA else [torch.float32]
# Above what one round of all splits takes; outputs of several pieces, and of less than one.
ODD = (1160, (520, 264, 40)) if CUDA else (300, (300, 136, 40))
SIZES = (
    [(4096, (4096, 1024, 1024)), (14336, (4096,)), (4096, (14336, 14336)), ODD] if CUDA else [ODD]
)
DECODE_TOKENS, PREFILL_TOKENS = 24, 80
ARENA_BYTES = 1 << 29 if CUDA else 16 << 20
RANKS = (1, 8, 15, 16, 17, 40, 64, 65, 130, 256) if CUDA else (1, 16, 17, 70)

Batch = tuple[list[int], list[int]]
"""Slots and lengths of the requests."""


def make_bench(
    dtype: torch.dtype,
    size: tuple[int, tuple[int, ...]] = ODD,
    *,
    slots: int = 6 if CUDA else 4,
    start: int = 0,
) -> Bench:
    return Bench(
        slots,
        dtype,
        inputs=size[0],
        widths=size[1],
        max_rank=max(RANKS),
        arena_bytes=start + ARENA_BYTES,
        start=start,
        std=size[0] ** -0.5,  # as trained weights: else float16 overflows
        device=DEVICE,
    )


def load_random(bench: Bench, ranks: Sequence[int], *, vectors: bool = False) -> None:
    """Every linear of every slot with one of `ranks`, or absent."""
    for slot in range(1, bench.slots):
        for column in range(len(bench.widths)):
            if torch.rand(()) < 0.8:
                bench.load(slot, column, ranks[int(torch.randint(len(ranks), ()))])
                for name in ("mul", "add") if vectors else ():
                    if torch.rand(()) < 0.5:
                        bench.load_vector(slot, column, name)


def kernels_of(bench: Bench) -> DeviceSgmv:
    return DeviceSgmv(bench.weights, [bench.slices], bench.max_rank, DECODE_TOKENS, PREFILL_TOKENS)


def inputs(bench: Bench, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x `[rows, K]` and a base output `[rows, N]`."""
    x, base = torch.randn(rows, bench.inputs), torch.randn(rows, sum(bench.widths))
    return x.to(DEVICE, bench.dtype), base.to(DEVICE, bench.dtype)


def run(
    bench: Bench,
    kernels: DeviceSgmv,
    batch: Batch,
    x: torch.Tensor,
    base: torch.Tensor,
    *,
    decode: bool,
) -> torch.Tensor:
    """The result on a copy of `base`, after filling the workspace with NaN."""
    kernels.describe(*batch, bench.rank_tiles, decode=decode)
    kernels._partial.fill_(float("nan"))
    return kernels.apply(x, bench.slices, base.clone())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_correct(
    bench: Bench, batch: Batch, x: torch.Tensor, base: torch.Tensor, got: torch.Tensor
) -> None:
    """Other rows and linears keep their bits; the rest is as near to float64 as plain torch."""
    slots = [slot for slot, rows in zip(*batch, strict=True) for _ in range(rows)]
    untouched = torch.ones(got.shape, dtype=torch.bool, device=DEVICE)
    for slot, column in bench.deltas:
        piece = bench.slices[column]
        mine = torch.tensor([s == slot for s in slots] + [False] * (len(x) - len(slots)))
        columns = slice(piece.out_offset, piece.out_offset + piece.b.features)
        untouched[mine.to(DEVICE).nonzero()[:, 0], columns] = False
    kept = untouched[:, :, None].expand(*got.shape, got.itemsize).reshape(len(got), -1)
    assert torch.equal(bits(got)[kept], bits(base)[kept])
    touched = ~untouched
    if not touched.any():
        return
    groups = make_groups(slots, DEVICE) if slots else []
    exact = bench.dense(x.double(), groups, base.double())[touched]
    plain = bench.dense(x, groups, base)[touched].double()
    error = (got[touched].double() - exact).norm() / exact.norm()
    plain_error = (plain - exact).norm() / exact.norm()
    # In float32 all that differs is the order of the sums. Long ones, of few splits, have come out
    # 2.5 times as far from float64 as torch's, which adds up more blocks side by side.
    allowed = 4.0 if bench.dtype == torch.float32 else 1.1
    assert error <= allowed * plain_error + 1e-7, f"{error:.3g}, torch {plain_error:.3g}"


def check(
    bench: Bench, kernels: DeviceSgmv, batch: Batch, *, decode: bool, padding: int = 0
) -> None:
    """One batch, with rows of NaN after it as a graph may have them."""
    total = sum(batch[1])
    x, base = inputs(bench, total + padding)
    x[total:], base[total:] = float("nan"), float("nan")
    assert_correct(bench, batch, x, base, run(bench, kernels, batch, x, base, decode=decode))


def decode_batch(bench: Bench, requests: int) -> Batch:
    return torch.randint(0, bench.slots, (requests,)).tolist(), [1] * requests


def prefill_batch(bench: Bench, lengths: list[int]) -> Batch:
    return torch.randint(0, bench.slots, (len(lengths),)).tolist(), lengths


low_too = pytest.mark.parametrize(
    "dtype",
    DTYPES if CUDA else [*DTYPES, torch.float16],
    ids=lambda dtype: str(dtype).split(".")[1],
)
both_plans = pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).split(".")[1])
