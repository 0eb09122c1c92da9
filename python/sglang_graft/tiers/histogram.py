"""Counts of durations by size, cheap enough for the scheduler loop."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypedDict

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Bounds in seconds, from a copy of a small adapter to a minute of waiting."""


class HistogramReport(TypedDict):
    """A histogram as plain JSON; `counts` has one entry a bound, and one for what is larger."""

    bounds: list[float]
    counts: list[int]
    sum: float


class Histogram:
    """How many observations lie at or below each bound, and above the bound before."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"histogram: wanted rising bounds, got {list(bounds)}")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Observations in all."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """One more observation. O(log bounds)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def report(self) -> HistogramReport:
        """As plain JSON."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}
