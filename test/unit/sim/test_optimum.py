"""The lower bound: exact where it can be worked out, and below every policy everywhere."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from helpers_sim import OPTIONS, asked, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_graft.sim.compare import bench
from sglang_graft.sim.optimum import Interval, _savings, uses
from sglang_graft.sim.workloads import Request, Segment

BETWEEN = [asked(0, 0, 1, output=2), asked(1, 1000, 4, output=5), asked(0, 2000, 1, output=6)]


def bound(requests: list[Request], pages: int, host_pages: int = 0) -> float:
    trace = tiny(requests)
    options = replace(OPTIONS, host_gb=(host_pages + 0.5) * 8 / 1e9 if host_pages else 0.0)
    return bench(trace, (pages + 0.5) * 8 / 1e9, options).optimum()


def test_no_room_saves_nothing() -> None:
    assert bound(BETWEEN, 4) == pytest.approx(3 * 25)


def test_one_page_saves_the_dearer_page() -> None:
    assert bound(BETWEEN, 5) == pytest.approx(3 * 25 - 8)  # KV 8 s, weights 5 s


def test_room_for_both_leaves_first_time_costs() -> None:
    assert bound(BETWEEN, 6) == pytest.approx(3 * 25 - 13)


def test_the_host_leaves_the_copies_to_pay() -> None:
    assert bound(BETWEEN, 4, host_pages=9) == pytest.approx(3 * 25 - 13 + 2)


def test_a_host_page_holds_one_page() -> None:
    assert bound(BETWEEN, 4, host_pages=1) == pytest.approx(3 * 25 - (8 - 1))


def test_pages_of_one_history_are_one_interval() -> None:
    long = [asked(0, at, 1, output=out, length=10) for at, out in ((0, 2), (1000, 3))]
    trace = tiny([long[0], asked(1, 500, 4, output=5), long[1]])
    plan = bench(trace, 1e-6, OPTIONS).plan
    found = uses(trace, plan, OPTIONS.rates)
    # The weights, and the 4 of 5 pages that a cache can supply.
    assert [(i.start, i.end, i.pages) for i in found.intervals] == [(1, 2, 1), (1, 2, 4)]


INTERVALS = st.builds(
    lambda start, length, full, copy: Interval(start, start + length, 1, full, min(full, copy)),
    st.integers(0, 5),
    st.integers(1, 5),
    st.integers(1, 9).map(float),
    st.integers(1, 3).map(float),
)


def brute(intervals: list[Interval], room: list[int], host: int) -> float:
    """The best of all ways to keep each interval on the device, on the host, or not at all."""
    best = 0.0
    slots = len(room)
    for places in itertools.product((0, 1, 2) if host else (0, 1), repeat=len(intervals)):
        used = np.zeros((3, slots), dtype=int)
        saved = 0.0
        for interval, place in zip(intervals, places, strict=True):
            used[place, interval.start : interval.end] += 1
            saved += (0.0, interval.full_s, interval.full_s - interval.copy_s)[place]
        if (used[1] <= room).all() and (used[2] <= host).all():
            best = max(best, saved)
    return best


@settings(deadline=None, max_examples=60)
@given(
    st.lists(INTERVALS, min_size=1, max_size=7),
    st.lists(st.integers(0, 3), min_size=11, max_size=11),
)
def test_one_tier_of_equal_pages_is_exact(intervals: list[Interval], room: list[int]) -> None:
    assert _savings(intervals, room, 0) == pytest.approx(brute(intervals, room, 0))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(INTERVALS, min_size=1, max_size=6),
    st.lists(st.integers(0, 2), min_size=11, max_size=11),
    st.integers(1, 2),
)
def test_two_tiers_save_at_least_the_best_whole_choice(
    intervals: list[Interval], room: list[int], host: int
) -> None:
    assert _savings(intervals, room, host) >= brute(intervals, room, host) - 1e-6


PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Up to 12 requests that share prompts of three segments below two adapters."""
    found: list[Request] = []
    at = 0.0
    for index in range(draw(st.integers(2, 12))):
        at += draw(st.sampled_from([0.0, 1.0, 30.0, 200.0]))
        prompt = tuple(Segment(key, 3) for key in draw(PROMPTS))
        output = Segment(100 + index, draw(st.integers(1, 4)), generated=True)
        found.append(Request(draw(st.integers(0, 1)), prompt, output, arrival_s=at))
    return found


@settings(deadline=None, max_examples=120)
@given(
    traces(),
    st.integers(9, 30),
    st.sampled_from([0, 0, 3, 6, 30]),
    st.sampled_from(["cost", "elora", "lru"]),
    st.booleans(),
)
def test_no_policy_is_below_the_bound(
    requests: list[Request], pages: int, host_pages: int, policy: str, rule: bool
) -> None:
    trace = tiny(requests, ranks=(1, 2))
    host_gb = (host_pages + 0.5) * 8 / 1e9 if host_pages else 0.0
    options = replace(OPTIONS, host_gb=host_gb, dependency_rule=rule)
    ready = bench(trace, (pages + 0.5) * 8 / 1e9, options)
    totals = ready.replay(policy).totals
    assert totals.cost_seconds >= ready.optimum() - 1e-6
    assert totals.requests == len(requests)
    assert rule <= (totals.invalid_kv_pages == 0)
