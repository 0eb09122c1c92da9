"""Which adapters have a label of their own in metrics: few, the busiest, and seldom others.

Each label value is a set of time series for ever, so their number is bounded, and a label is
exchanged only when that is clearly worth it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

BASE, OTHER, UNKNOWN = "(base)", "(other)", "(unknown)"
WINDOW_SECONDS = 300.0
LEAST = 20
"""Requests in a window below which no adapter takes the label of another."""
_WATCHED = 1024


@dataclass(slots=True)
class AdapterLabels:
    """At most `most` names have labels. The first ones that are used get them.

    Later, at the end of a window, the busiest name without a label takes that of the least busy
    one, if it had twice the requests; one exchange a window. `dropped` hears which name lost its
    label: its series end, and begin at 0 should it get one again.
    """

    most: int
    dropped: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    _chosen: dict[str, int] = field(default_factory=dict)
    _others: dict[str, int] = field(default_factory=dict)
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.now()

    def label(self, name: str) -> str:
        """The label of an adapter, without counting a request; it gets one if there is one left."""
        if name not in self._chosen and len(self._chosen) < self.most:
            self._chosen[name] = 0
        return name if name in self._chosen else OTHER

    def count(self, name: str) -> str:
        """The label of an adapter that has one more request."""
        if self.now() - self._began >= WINDOW_SECONDS:
            self._exchange()
        label = self.label(name)
        if label is not OTHER:
            self._chosen[name] += 1
        elif name in self._others or len(self._others) < _WATCHED:
            self._others[name] = self._others.get(name, 0) + 1
        return label

    def names(self) -> list[str]:
        """Who has a label, in the order in which they got it."""
        return list(self._chosen)

    def _exchange(self) -> None:
        if self._others and self._chosen:
            best = max(self._others, key=lambda name: (self._others[name], name))
            worst = min(self._chosen, key=lambda name: (self._chosen[name], name))
            if self._others[best] >= max(LEAST, 2 * self._chosen[worst]):
                del self._chosen[worst]
                self._chosen[best] = 0
                self.dropped(worst)
        self._chosen = dict.fromkeys(self._chosen, 0)
        self._others.clear()
        self._began = self.now()
