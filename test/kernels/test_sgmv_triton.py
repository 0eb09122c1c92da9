"""The Triton kernels against dense float64, from tiles in an arena in which all else is NaN.

On a CUDA device where there is one. Elsewhere in Triton's interpreter, at small sizes, when
TRITON_INTERPRET=1 is set: that checks every address and mask, but neither bfloat16 nor what the
launch options (`num_warps`, `num_stages`, `maxnreg`, `launch_pdl`) do, which it ignores.
"""

from dataclasses import replace

import pytest
import torch
from kernel_checks import (
    CUDA,
    DECODE_TOKENS,
    DTYPES,
    INTERPRETED,
    PREFILL_TOKENS,
    RANKS,
    SIZES,
    all_dtypes,
    bits,
    both_plans,
    check,
    decode_batch,
    inputs,
    kernels_of,
    load_random,
    low_too,
    make_bench,
    prefill_batch,
    run,
)

from graft_kernels.sgmv import device
from graft_kernels.sgmv.dispatch import Shrink, shrink_config
from graft_kernels.sgmv.plan import Shape

if not CUDA and not INTERPRETED:
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

pytestmark = [
    *([pytest.mark.gpu] if CUDA else []),
    # The interpreter turns arrays of one element into numbers in a way that numpy will give up.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other, some ten thousand times as slowly."""
    if INTERPRETED:
        monkeypatch.setattr(device, "DECODE", Shape(block_rows=16, programs=6))
        monkeypatch.setattr(device, "PREFILL", Shape(block_rows=64, programs=6))
        monkeypatch.setattr(device, "shrink_config", _two_splits)


def _two_splits(shape: Shape, tokens: int, features: int) -> Shrink:
    return replace(shrink_config(shape, tokens, features), splits=2)


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
