"""Routing: the bound holds always, and an adapter stays where it was as far as the bound allows."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_graft.sim.routing import ROUTINGS, Ring, router


@given(
    replicas=st.integers(1, 9),
    bound=st.sampled_from([1.05, 1.25, 2.0]),
    asked=st.lists(st.integers(0, 19), max_size=60),
)
def test_no_load_is_above_the_bound(replicas: int, bound: float, asked: list[int]) -> None:
    ring = Ring(replicas, 20, bound, seed=3)
    loads = [0] * replicas
    for total, adapter in enumerate(asked):
        loads[ring.choose(adapter, loads, total)] += 1
        assert max(loads) <= math.ceil(bound * (total + 1) / replicas)
    assert sum(loads) == len(asked)


def test_an_adapter_stays_when_loads_are_small_and_moves_when_they_are_not() -> None:
    ring = Ring(10, 100, seed=1)
    idle = [0] * 10
    home = {adapter: ring.choose(adapter, idle, 0) for adapter in range(100)}
    assert home == {adapter: ring.choose(adapter, idle, 0) for adapter in range(100)}
    assert len(set(home.values())) == 10
    full = list(idle)
    full[home[7]] = 50
    assert ring.choose(7, full, 50) != home[7]
    assert Ring(10, 100, seed=1).choose(7, full, 50) == ring.choose(7, full, 50)


def test_routing_without_looking_spreads_evenly() -> None:
    turn = router("round-robin", replicas=4, adapters=9, seed=0)
    assert [turn(5, [0] * 4, 0) for _ in range(8)] == [0, 1, 2, 3] * 2
    least = router("least-loaded", replicas=4, adapters=9, seed=0)
    assert least(5, [3, 1, 1, 2], 7) == 1
    drawn = router("random", replicas=4, adapters=9, seed=0)
    counts = Counter(drawn(5, [0] * 4, 0) for _ in range(8000))
    assert all(1800 < counts[i] < 2200 for i in range(4))


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match=", ".join(ROUTINGS)):
        router("nearest", replicas=2, adapters=2, seed=0)
    with pytest.raises(ValueError, match="bound > 1"):
        Ring(2, 2, bound=1.0)
