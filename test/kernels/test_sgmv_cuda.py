"""The Triton kernels on a CUDA device: large batches, far addresses, graphs, and compilation."""

from collections.abc import Callable

import pytest
import torch
from kernel_checks import (
    CUDA,
    DECODE_TOKENS,
    PREFILL_TOKENS,
    RANKS,
    SIZES,
    all_dtypes,
    assert_correct,
    bits,
    both_plans,
    check,
    decode_batch,
    inputs,
    kernels_of,
    load_random,
    make_bench,
    run,
)

from graft_kernels.sgmv import device
from graft_kernels.sgmv.dispatch import PREFILL_SIZES
from graft_kernels.sgmv.triton_expand import _expand
from graft_kernels.sgmv.triton_shrink import _shrink

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


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


@all_dtypes
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("early", [True, False], ids=["early", "in_turn"])
def test_a_decode_graph_shrinks_beside_the_base_product(
    dtype: torch.dtype,
    size: tuple[int, tuple[int, ...]],
    early: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`expand` is launched early, or in its turn as on devices that cannot do that."""
    if not early:
        monkeypatch.setattr(device, "_can_overlap", lambda _: False)
    elif not device._can_overlap(torch.device("cuda")):
        pytest.skip("needs compute capability 9.0")
    bench = make_bench(dtype, size)
    load_random(bench, RANKS, vectors=True)
    kernels, rows, rounds = kernels_of(bench), DECODE_TOKENS, 4
    kernels.compile(bench.slices)
    given = [inputs(bench, rows) for _ in range(rounds)]
    outs = [torch.empty_like(base) for _, base in given]
    kernels.describe([0] * rows, [1] * rows, bench.rank_tiles, decode=True)

    def step() -> None:
        for (x, base), out in zip(given, outs, strict=True):
            kernels.begin(x, bench.slices)
            torch.cuda._sleep(50_000)  # the base output is there late
            out.copy_(base)
            kernels.apply(x, bench.slices, out)

    graph = capture(step)
    assert kernels.begun == rounds
    for slots in ([1, 2, 3, 4, 5] * 4, [3] * rows, [0] * rows, [2, 0, 1]):
        batch = (list(slots), [1] * len(slots))
        for (x, _), out in zip(given, outs, strict=True):
            x.normal_()
            out.fill_(float("nan"))
        kernels._partial.fill_(float("nan"))
        kernels.describe(*batch, bench.rank_tiles, decode=True)
        graph.replay()
        got = [out.clone() for out in outs]
        for (x, base), out in zip(given, got, strict=True):
            assert_correct(bench, batch, x, base, out)
            assert torch.equal(bits(out), bits(run(bench, kernels, batch, x, base, decode=True)))


def test_rows_that_were_begun_must_be_those_that_are_applied() -> None:
    bench = make_bench(torch.bfloat16, SIZES[0])
    kernels, rows = kernels_of(bench), DECODE_TOKENS
    kernels.compile(bench.slices)
    x, base = inputs(bench, rows)
    kernels.begin(x, bench.slices)
    assert not kernels.begun, "nothing is captured"
    kernels.clear(decode=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        kernels.begin(x, bench.slices)
        with pytest.raises(AssertionError, match="begun and not applied"):
            kernels.begin(x, bench.slices)
        kernels.apply(x, bench.slices, base)
        kernels.begin(x, bench.slices)
        other = base[:, : x.shape[1]]
        with pytest.raises(AssertionError, match="were begun"):
            kernels.apply(other, bench.slices, base)
        torch.cuda.current_stream().wait_stream(kernels._beside)
    assert kernels.begun == 2


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
        # Only graphs pad, and only up to the rows that the plan provides for.
        padding = 5 if length + 8 <= PREFILL_TOKENS else 0
        check(bench, kernels, ([1, 0], [length, 3]), decode=False, padding=padding)
    now = [len(kernel.device_caches[here][0]) for kernel in (_shrink, _expand)]
    assert now == compiled
