"""The Triton kernels against dense float64, from tiles in an arena in which all else is NaN.

On a CUDA device where there is one. Elsewhere in Triton's interpreter, at small sizes, when
TRITON_INTERPRET=1 is set: that checks every address and mask, but neither bfloat16 nor what the
launch options (`num_warps`, `num_stages`, `maxnreg`, `launch_pdl`) do, which it ignores.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from lora_bench import Bench, make_groups

from graft_kernels.sgmv import device
from graft_kernels.sgmv.device import DeviceSgmv
from graft_kernels.sgmv.dispatch import PREFILL_SIZES, Shrink, shrink_config
from graft_kernels.sgmv.plan import Shape
from graft_kernels.sgmv.triton_expand import _expand
from graft_kernels.sgmv.triton_shrink import _shrink

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
if not CUDA and not INTERPRETED:
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

pytestmark = [
    *([pytest.mark.gpu] if CUDA else []),
    # The interpreter turns arrays of one element into numbers in a way that numpy will give up.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]
cuda_only = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")

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


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other, some ten thousand times as slowly."""
    if INTERPRETED:
        monkeypatch.setattr(device, "DECODE", Shape(block_rows=16, programs=6))
        monkeypatch.setattr(device, "PREFILL", Shape(block_rows=64, programs=6))
        monkeypatch.setattr(device, "shrink_config", _two_splits)


def _two_splits(shape: Shape, tokens: int, features: int, *, overlap: bool) -> Shrink:
    return replace(shrink_config(shape, tokens, features, overlap=overlap), splits=2)


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
    # In float32 all that differs is the order of the sums, which favours either.
    allowed = 2.0 if bench.dtype == torch.float32 else 1.1
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


@low_too
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_random_ranks_and_absent_linears(
    dtype: torch.dtype, size: tuple[int, tuple[int, ...]], seed: int
) -> None:
    torch.manual_seed(seed)
    bench = make_bench(dtype, size)
    load_random(bench, RANKS)
    kernels = kernels_of(bench)
    check(bench, kernels, decode_batch(bench, 20), decode=True, padding=4)
    check(bench, kernels, prefill_batch(bench, [30, 1, 0, 17, 9]), decode=False, padding=3)


@all_dtypes
@both_plans
@pytest.mark.parametrize("rank", RANKS)
def test_every_rank(dtype: torch.dtype, decode: bool, rank: int) -> None:
    bench = make_bench(dtype, slots=2)
    bench.load_all(1, rank)
    check(bench, kernels_of(bench), ([1, 0, 1], [1, 1, 1]), decode=decode)


@all_dtypes
@both_plans
def test_mixed_ranks_in_one_batch(dtype: torch.dtype, decode: bool) -> None:
    bench = make_bench(dtype, slots=len(RANKS) + 1)
    for slot, rank in enumerate(RANKS, start=1):
        bench.load_all(slot, rank)
    slots = [*range(bench.slots), *range(bench.slots)]
    check(bench, kernels_of(bench), (slots, [1] * len(slots)), decode=decode)


@all_dtypes
@both_plans
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_single_token(dtype: torch.dtype, decode: bool, slot: int) -> None:
    bench = make_bench(dtype, slots=3)
    bench.load(1, 1, 5)
    bench.load(2, 0, 40)
    kernels = kernels_of(bench)
    check(bench, kernels, ([slot], [1]), decode=decode)
    check(bench, kernels, ([slot], [1]), decode=decode, padding=7)


@both_plans
def test_empty_requests_and_an_empty_batch(decode: bool) -> None:
    bench = make_bench(DTYPES[0], slots=4)
    load_random(bench, RANKS)
    kernels = kernels_of(bench)
    check(bench, kernels, ([1, 2, 0, 3], [0, 3, 0, 0]), decode=decode)
    check(bench, kernels, ([1, 3], [0, 0]), decode=decode, padding=5)
    check(bench, kernels, ([], []), decode=decode, padding=5)


@all_dtypes
def test_segments_of_many_blocks(dtype: torch.dtype) -> None:
    bench = make_bench(dtype, slots=3)
    bench.load_all(1, 16)
    bench.load(2, 0, 33)
    kernels = kernels_of(bench)
    check(bench, kernels, ([1, 2, 1], [63, 2, 15]), decode=False)
    check(bench, kernels, ([1] * DECODE_TOKENS, [1] * DECODE_TOKENS), decode=True)


@all_dtypes
def test_batches_in_turn_leave_nothing_behind(dtype: torch.dtype) -> None:
    bench = make_bench(dtype)
    load_random(bench, RANKS)
    kernels = kernels_of(bench)
    last = bench.slots - 1
    several, few, base = [1, 2, 0, last, 1, 2, last, 1, 0, 2], [last, 0, 0, last], [0] * 10
    for slots, decode in (
        *((several, True), (few, True), (base, True), (few, True), (several, False)),
        *((base, False), (several, True), (few, False)),
    ):
        check(bench, kernels, (slots, [1] * len(slots)), decode=decode, padding=12 - len(slots))


@both_plans
def test_a_cleared_batch_changes_nothing(decode: bool) -> None:
    bench = make_bench(DTYPES[0])
    load_random(bench, RANKS)
    kernels = kernels_of(bench)
    check(bench, kernels, decode_batch(bench, 16), decode=decode)
    x, base = inputs(bench, 16)
    base[0, 0], base[1, 1], base[2, 2] = -0.0, float("nan"), float("inf")
    kernels.clear(decode=decode)
    assert torch.equal(bits(kernels.apply(x, bench.slices, base.clone())), bits(base))


@both_plans
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_in_one_adapter_changes_no_row_of_another(decode: bool, bad: float) -> None:
    slots = [1, 2, 0, 1, 2, 3]
    batch = (slots, [1] * len(slots))
    results = []
    x, base = inputs(make_bench(DTYPES[0]), len(slots))
    for value in (1.0, bad):
        torch.manual_seed(1)
        bench = make_bench(DTYPES[0], slots=4)
        bench.load_all(1, 20)
        bench.load_all(2, 33, value=value)
        bench.load_all(3, 5)
        results.append(run(bench, kernels_of(bench), batch, x, base, decode=decode))
    good, spoilt = results
    others = [0, 2, 3, 5]
    assert torch.equal(bits(good[others]), bits(spoilt[others]))
    assert not spoilt[[1, 4]].isfinite().any()


@both_plans
def test_nan_in_one_row_changes_no_other(decode: bool) -> None:
    bench = make_bench(DTYPES[0])
    load_random(bench, RANKS)
    kernels, batch = kernels_of(bench), ([1, 1, 2, 3, 3, 0], [1] * 6)
    x, base = inputs(bench, 6)
    good = run(bench, kernels, batch, x, base, decode=decode)
    x[[0, 3]], base[4] = float("nan"), float("inf")
    spoilt = run(bench, kernels, batch, x, base, decode=decode)
    others = [1, 2, 5]
    assert torch.equal(bits(good[others]), bits(spoilt[others]))


@low_too
@pytest.mark.parametrize("seed", range(2))
def test_vectors(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    bench = make_bench(dtype)
    load_random(bench, RANKS, vectors=True)
    kernels = kernels_of(bench)
    check(bench, kernels, decode_batch(bench, 20), decode=True, padding=2)
    check(bench, kernels, prefill_batch(bench, [30, 1, 17, 9]), decode=False)


@both_plans
@pytest.mark.parametrize("names", [("mul",), ("add",), ("mul", "add")], ids="-".join)
def test_vectors_of_each_kind(decode: bool, names: tuple[str, ...]) -> None:
    bench = make_bench(DTYPES[0], slots=3)
    bench.load_all(1, 16)
    bench.load_all(2, 16)
    for column in range(3):
        for name in names:
            bench.load_vector(1, column, name)
    check(bench, kernels_of(bench), ([1, 2, 0, 1], [1] * 4), decode=decode)


@all_dtypes
@both_plans
def test_rows_with_a_stride_of_their_own(dtype: torch.dtype, decode: bool) -> None:
    bench = make_bench(dtype)
    load_random(bench, RANKS)
    kernels, batch = kernels_of(bench), decode_batch(bench, 12)
    x, base = inputs(bench, 12)
    wanted = run(bench, kernels, batch, x, base, decode=decode)
    for before, after in ((0, 16), (8, 3)):
        wide = torch.full((12, before + bench.inputs + after), float("nan")).to(x)
        wide[:, before : before + bench.inputs] = x
        part = wide[:, before : before + bench.inputs]
        got = run(bench, kernels, batch, part, base, decode=decode)
        assert torch.equal(bits(got), bits(wanted))
        outs = torch.zeros(12, before + base.shape[1] + after).to(x)
        target = outs[:, before : before + base.shape[1]]
        target.copy_(base)
        assert kernels.apply(part, bench.slices, target) is target
        assert torch.equal(bits(target), bits(wanted))
        assert not outs[:, :before].any()
        assert not outs[:, before + base.shape[1] :].any()


@all_dtypes
@both_plans
def test_the_same_bits_twice(dtype: torch.dtype, decode: bool) -> None:
    bench = make_bench(dtype)
    load_random(bench, RANKS)
    kernels, batch = kernels_of(bench), decode_batch(bench, 20)
    x, base = inputs(bench, 20)
    first, second = (run(bench, kernels, batch, x, base, decode=decode) for _ in range(2))
    assert torch.equal(bits(first), bits(second))


@all_dtypes
@both_plans
def test_a_row_alone_has_the_bits_that_it_has_among_others(
    dtype: torch.dtype, decode: bool
) -> None:
    bench = make_bench(dtype)
    load_random(bench, RANKS)
    kernels, batch = kernels_of(bench), decode_batch(bench, 20)
    x, base = inputs(bench, 20)
    together = run(bench, kernels, batch, x, base, decode=decode)
    for row in (0, 7, 19):
        one = slice(row, row + 1)
        alone = run(bench, kernels, (batch[0][one], [1]), x[one], base[one], decode=decode)
        assert torch.equal(bits(alone), bits(together[one]))


def test_batches_beyond_the_plans_grow_them() -> None:
    bench = make_bench(DTYPES[0], slots=3)
    bench.load_all(1, 16)
    bench.load(2, 1, 40)
    kernels = kernels_of(bench)
    check(bench, kernels, ([1, 2] * DECODE_TOKENS, [1] * 2 * DECODE_TOKENS), decode=True)
    check(bench, kernels, ([1, 2, 0], [PREFILL_TOKENS, 20, 9]), decode=False)
    check(bench, kernels, ([2, 1], [3, 5]), decode=False)
    check(bench, kernels, ([1], [PREFILL_TOKENS + 1]), decode=False)
    check(bench, kernels, ([2, 1], [PREFILL_TOKENS, 2 * PREFILL_TOKENS]), decode=False)
    check(bench, kernels, ([2, 1], [1, 1]), decode=True)


def test_compile_changes_nothing_and_leaves_no_batch() -> None:
    bench = make_bench(DTYPES[0], slots=3)
    bench.load_all(1, 16)
    kernels = kernels_of(bench)
    kernels.describe([1], [3], bench.rank_tiles, decode=True)
    kernels.compile(bench.slices)
    x, base = inputs(bench, 3)
    kernels.clear(decode=True)
    assert torch.equal(bits(kernels.apply(x, bench.slices, base.clone())), bits(base))
    check(bench, kernels, ([1], [3]), decode=True)


# What follows needs a real device.


@cuda_only
@all_dtypes
@pytest.mark.parametrize("rank", [16, 64])
def test_a_segment_of_8192_tokens(dtype: torch.dtype, rank: int) -> None:
    bench = make_bench(dtype, SIZES[0], slots=3)
    bench.load_all(1, rank)
    bench.load_all(2, 8)
    kernels = kernels_of(bench)
    for lengths in ([8192], [8191, 1], [*PREFILL_SIZES]):
        slots = [1, 2, 1][: len(lengths)]
        check(bench, kernels, (slots, lengths), decode=False)


@cuda_only
@both_plans
def test_tiles_beyond_4_gib(decode: bool) -> None:
    bench = make_bench(torch.bfloat16, SIZES[0], start=(4 << 30) + (1 << 20))
    load_random(bench, RANKS)
    check(bench, kernels_of(bench), decode_batch(bench, 20), decode=decode)


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `step`; fails if it allocates or waits for the device."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    return graph


@cuda_only
@all_dtypes
@both_plans
def test_a_graph_replays_every_later_batch(dtype: torch.dtype, decode: bool) -> None:
    bench = make_bench(dtype, SIZES[0])
    load_random(bench, RANKS, vectors=True)
    kernels, rows = kernels_of(bench), DECODE_TOKENS
    x, base = inputs(bench, rows)
    out = torch.empty_like(base)
    kernels.describe([0] * rows, [1] * rows, bench.rank_tiles, decode=decode)

    def step() -> None:
        out.copy_(base)
        kernels.apply(x, bench.slices, out)

    graph = capture(step)
    histories = ([1, 2, 3, 4, 5] * 4, [3] * rows, [0] * rows, [2, 0, 1], [], [5])
    for slots in histories:
        x.normal_()
        batch = (list(slots), [1] * len(slots))
        out.fill_(float("nan"))
        kernels._partial.fill_(float("nan"))
        kernels.describe(*batch, bench.rank_tiles, decode=decode)
        graph.replay()
        got = out.clone()
        assert_correct(bench, batch, x, base, got)
        assert torch.equal(bits(got), bits(run(bench, kernels, batch, x, base, decode=decode)))


@cuda_only
def test_a_graph_outlives_the_growth_of_the_plans() -> None:
    bench = make_bench(torch.bfloat16, SIZES[0])
    load_random(bench, RANKS)
    kernels, batch = kernels_of(bench), decode_batch(bench, DECODE_TOKENS)
    x, base = inputs(bench, DECODE_TOKENS)
    out = base.clone()
    kernels.describe(*batch, bench.rank_tiles, decode=True)
    graph = capture(lambda: kernels.apply(x, bench.slices, out))
    check(bench, kernels, ([1, 2], [4000, 96]), decode=False)
    kernels.describe(*batch, bench.rank_tiles, decode=True)
    out.copy_(base)
    graph.replay()
    assert_correct(bench, batch, x, base, out)


@cuda_only
@both_plans
def test_a_batch_is_described_without_waiting(decode: bool) -> None:
    bench = make_bench(torch.bfloat16)
    load_random(bench, RANKS)
    kernels, tiles = kernels_of(bench), bench.rank_tiles
    batches = [decode_batch(bench, 20) for _ in range(4)]
    x, base = inputs(bench, 20)
    kernels.describe(*batches[0], tiles, decode=decode)
    kernels.apply(x, bench.slices, base.clone())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            kernels.describe(*batch, tiles, decode=decode)
            kernels.apply(x, bench.slices, base)
            kernels.clear(decode=decode)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@cuda_only
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_compile_leaves_nothing_to_compile(size: tuple[int, tuple[int, ...]]) -> None:
    bench = make_bench(torch.bfloat16, size)
    load_random(bench, RANKS)
    kernels, here = kernels_of(bench), torch.cuda.current_device()
    kernels.compile(bench.slices)
    compiled = [len(kernel.device_caches[here][0]) for kernel in (_shrink, _expand)]
    assert all(compiled)
    for requests in (1, 7, 20, DECODE_TOKENS):
        check(bench, kernels, decode_batch(bench, requests), decode=True)
    for length in (1, 64, *PREFILL_SIZES, 5000):
        check(bench, kernels, ([1, 0], [length, 3]), decode=False, padding=5)
    now = [len(kernel.device_caches[here][0]) for kernel in (_shrink, _expand)]
    assert now == compiled
