"""What the CUDA kernels refuse, and how much scratch memory they ask for. Launches nothing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_bench import Bench

from graft_kernels.sgmv import Weights
from graft_kernels.sgmv.device import DeviceSgmv
from graft_kernels.sgmv.dispatch import (
    DECODE,
    LONG_INPUT,
    PREFILL,
    partial_numbers,
    shrink_config,
)
from graft_kernels.sgmv.plan import Shape


def test_tiles_larger_than_a_page_are_refused() -> None:
    bench = Bench(slots=2, chunk_features=16)
    with pytest.raises(ValueError, match=r"a tile of 48 features .*set --page-size to more tokens"):
        DeviceSgmv(bench.weights, [bench.slices], 64, 8, 8)
    for name in ("mul", "add"):
        whole = Bench(slots=2).slices
        split = replace(whole[1], **{name: getattr(bench.slices[1], name)})
        with pytest.raises(ValueError, match=r"a tile of 24 features .*set --page-size"):
            DeviceSgmv(bench.weights, [whole, [split]], 64, 8, 8)


def test_other_rank_tiles_are_refused() -> None:
    good = Bench(slots=2)
    w = good.weights
    weights = Weights(w.addresses, w.ranks, w.scales, w.arena, w.dtype, rank_tile=32)
    with pytest.raises(ValueError, match=r"rank_tile: wanted 16, got 32"):
        DeviceSgmv(weights, [good.slices], 64, 8, 8)


def test_more_than_three_slices_are_refused() -> None:
    bench = Bench(slots=2, widths=(8, 8, 8, 8))
    with pytest.raises(ValueError, match=r"wanted at most 3 in a projection: 4"):
        DeviceSgmv(bench.weights, [bench.slices[:1], bench.slices], 64, 8, 8)


@given(
    st.sampled_from([DECODE, PREFILL]),
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from([1, LONG_INPUT - 1, LONG_INPUT, 4 * LONG_INPUT]),
)
def test_partial_sums_fit_every_smaller_batch(
    shape: Shape, most: int, tokens: int, features: int
) -> None:
    tokens = min(tokens, most)
    splits = shrink_config(shape, tokens, features).splits
    assert splits * tokens * 3 * 64 <= partial_numbers(shape, most, 3, 64)
