"""What left the device, and what asked for the room: counts since start, and the latest few."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

KEPT = 64
"""How many departures are remembered one by one."""


class Reason(enum.StrEnum):
    """What asked for the pages."""

    REQUEST = "request"  # KV of a request that runs or is about to
    ADAPTER = "adapter"  # weights of an adapter that a request waits for
    PROMOTION = "promotion"  # KV that comes back from the host
    CAP = "cap"  # a tenant at its page cap made room for itself
    PIN = "pin"  # weights of a pinned adapter
    UNLOAD = "unload"  # the adapter was unloaded or replaced
    FLUSH = "flush"  # the pool was emptied


class Departure(NamedTuple):
    """Pages that left the device together.

    clock: logical time.   at: wall time, for display only.   identity: whose weights or KV.
    weights: whether these are the adapter's weights.   pages: how many.
    kept: whether the bytes are still in host memory.
    """

    clock: int
    at: float
    reason: Reason
    identity: str | None
    weights: bool
    pages: int
    kept: bool


def _no_time() -> float:
    return 0.0


@dataclass(slots=True)
class Departures:
    """Written by the tree at O(1) each; nothing is decided by it.

    `now` gives wall time; whoever shows departures to people sets it.
    """

    now: Callable[[], float] = _no_time
    counts: dict[tuple[Reason, bool], list[int]] = field(default_factory=dict)
    """(reason, weights) -> [departures, pages]."""
    _latest: deque[tuple[int, float, Reason, str | None, bool, int, bool]] = field(
        default_factory=lambda: deque(maxlen=KEPT)
    )

    def note(
        self,
        clock: int,
        reason: Reason,
        identity: str | None,
        pages: int,
        *,
        weights: bool,
        kept: bool,
    ) -> None:
        """Pages have left; no pages are no departure."""
        if not pages:
            return
        count = self.counts.get((reason, weights))
        if count is None:
            count = self.counts[reason, weights] = [0, 0]
        count[0] += 1
        count[1] += pages
        # A plain tuple: making a named one would double what a departure costs.
        self._latest.append((clock, self.now(), reason, identity, weights, pages, kept))

    def latest(self) -> list[Departure]:
        """The latest `KEPT` departures, the last one at the end."""
        return [Departure._make(one) for one in self._latest]

    def check_invariants(self) -> None:
        """Assert that the latest ones are in order and were counted."""
        clocks = [one.clock for one in self.latest()]
        assert clocks == sorted(clocks), f"departures out of order: {clocks}"
        events = sum(count[0] for count in self.counts.values())
        assert len(clocks) == min(events, KEPT), f"{len(clocks)} of {events} departures"
