"""Histograms of durations."""

import pytest
from helpers_tiers import World
from hypothesis import given
from hypothesis import strategies as st

from sglang_graft.tiers import SECONDS, Histogram


@given(st.lists(st.floats(0, 100)))
def test_every_observation_is_in_its_bucket(values: list[float]) -> None:
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.observe(value)
    report = histogram.report()
    seen = 0
    for bound, count in zip(report["bounds"], report["counts"], strict=False):
        seen += count
        assert seen == sum(value <= bound for value in values), f"at or below {bound}"
    assert histogram.count == len(values)
    assert report["sum"] == pytest.approx(sum(values))


@pytest.mark.parametrize("bounds", [(), (1, 1), (2, 1)])
def test_bounds_must_rise(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="wanted rising bounds"):
        Histogram(bounds)


def test_a_load_is_measured_from_its_start_to_its_landing() -> None:
    world = World(12, 30)
    clock = [10.0]
    world.transfers.now = lambda: clock[0]
    world.register(0, 5)
    world.settle()
    waiting = world.enqueue(0, (1,))
    assert waiting
    world.tiers.step([waiting.wish])
    clock[0] = 10.2
    world.copier.drain()
    assert world.transfers.load_seconds.count == 0
    world.transfers.poll()
    assert world.transfers.load_seconds.count == 1
    assert world.transfers.load_seconds.sum == pytest.approx(0.2)
