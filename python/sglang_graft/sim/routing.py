"""Which replica serves a request: by adapter on a ring with bounded loads, or without looking."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

_POINTS = 64
"""Points of each replica on the ring; more of them even out the arcs."""


@dataclass(slots=True)
class Ring:
    """Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, arXiv 1608.01350).

    An adapter's replicas are those that follow its point on the ring. The first one takes the
    request whose load, with it, is at most `bound` times the mean, rounded up.
    """

    replicas: int
    adapters: int
    bound: float = 1.25
    seed: int = 0
    _owners: list[int] = field(init=False)
    _first: list[int] = field(init=False)

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.bound <= 1:
            raise ValueError(
                f"Ring: wanted replicas >= 1 and bound > 1, got {self.replicas}, {self.bound}"
            )
        source = np.random.default_rng(self.seed)
        points = source.random(self.replicas * _POINTS)
        order = np.argsort(points)
        self._owners = (order % self.replicas).tolist()
        own = source.random(self.adapters)
        self._first = (np.searchsorted(points[order], own) % len(order)).tolist()

    def choose(self, adapter: int, loads: Sequence[int], total: int) -> int:
        """The replica of one more request. loads: requests under way on each; total: their sum."""
        most = math.ceil(self.bound * (total + 1) / self.replicas)
        place = self._first[adapter]
        while loads[self._owners[place]] + 1 > most:
            place = (place + 1) % len(self._owners)
        return self._owners[place]


Choose = Callable[[int, Sequence[int], int], int]
"""Adapter, loads and their sum -> replica."""


def router(name: str, *, replicas: int, adapters: int, seed: int, bound: float = 1.25) -> Choose:
    """The routing called `name`. ValueError names the known ones.

    affinity: `Ring`; round-robin; random; least-loaded: fewest requests under way, the first of
    equals.
    """
    if name == "affinity":
        return Ring(replicas, adapters, bound, seed).choose
    if name == "least-loaded":
        return lambda adapter, loads, total: loads.index(min(loads))
    if name == "round-robin":
        turn = iter(range(1 << 62))
        return lambda adapter, loads, total: next(turn) % replicas
    if name == "random":
        drawn = np.random.default_rng(seed)
        block: list[int] = []

        def choose(adapter: int, loads: Sequence[int], total: int) -> int:
            if not block:
                block.extend(drawn.integers(replicas, size=4096).tolist())
            return block.pop()

        return choose
    raise ValueError(f"--routing: wanted one of {', '.join(ROUTINGS)}, got {name!r}")


ROUTINGS = ("affinity", "least-loaded", "random", "round-robin")
