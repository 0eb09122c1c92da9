"""Prices of this pool, measured while it works and frozen for a window of its logical clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from sglang_graft.cache import Prices, RateMeter, UnifiedTree

WINDOW = 1024
"""Ticks of the tree's clock: some hundred requests."""


class Rates(Protocol):
    """What it costs, in seconds, to bring KV back. Changes only where all ranks change it alike."""

    def load_seconds(self, nbytes: int) -> float:
        """A copy of `nbytes` from the host pool to the device."""

    def prefill_seconds(self, tokens: int, depth: int) -> float:
        """Computing the KV of `tokens` tokens that follow `depth` others."""


@dataclass(slots=True)
class MeasuredRates:
    """Gives `prices` what `meter` saw, once a window, and has the tree order its victims anew.

    Seconds are measured by clocks, so the meter alone may look at them: decisions go by prices that
    stand still within a window. O(nodes) when prices change and the policy goes by them.
    """

    tree: UnifiedTree
    prices: Prices
    window: int = WINDOW
    meter: RateMeter = field(init=False)
    changes: int = 0
    _began: int = 0

    def __post_init__(self) -> None:
        self.meter = RateMeter(current=self.prices.rates)

    def step(self) -> None:
        """One scheduling pass: end the window if it is over."""
        if self.tree.clock - self._began < self.window:
            return
        self._began = self.tree.clock
        if self.meter.freeze():
            self.changes += 1
            self.prices.rates = self.meter.current
            if self.tree.policy.priced:
                self.tree.reprice()
