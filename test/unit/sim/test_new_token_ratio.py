"""The new-token ratio: figures of SGLang 0.5.17 by hand."""

import pytest

from sglang_graft.sim.reserve import Reserve


def test_it_falls_evenly_for_600_steps_and_no_further() -> None:
    reserve = Reserve()
    assert reserve.tokens([1000]) == 700
    reserve.decode(300)
    assert reserve.ratio == pytest.approx((0.7 + 0.098) / 2)
    reserve.decode(300)
    assert reserve.ratio == pytest.approx(0.098)
    reserve.decode(10_000)
    assert reserve.ratio == pytest.approx(0.098)
    reserve.pause()
    assert reserve.ratio == 0.7


def test_it_is_a_part_of_what_each_has_left_of_which_4096_tokens_count() -> None:
    assert Reserve(ratio=0.5).tokens([100, 4096, 50_000]) == 0.5 * (100 + 4096 + 4096)
    assert Reserve().tokens([]) == 0


def test_after_a_retraction_it_is_what_the_others_have_used_and_20_tokens() -> None:
    reserve = Reserve(ratio=0.098)
    reserve.retracted(made=[30, 10], most=[99, 100])
    assert reserve.ratio == (30 + 20 + 10 + 20) / (99 + 100 + 1)
    reserve.retracted(made=[90], most=[99])
    assert reserve.ratio == 1.0
    reserve.retracted(made=[1], most=[4000])
    assert reserve.ratio == 21 / 4001  # lower than it falls
    reserve.decode(1)
    assert reserve.ratio == pytest.approx(0.098)
