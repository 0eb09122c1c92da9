"""The published score of ELORA, to compare with."""

from __future__ import annotations

import math
from collections import Counter, deque

from sglang_graft.cache.cost import Prices
from sglang_graft.cache.node import AdapterNode, Node
from sglang_graft.cache.policy import EvictionPolicy, weight


class Elora(EvictionPolicy):
    """Eval of arXiv 2505.03756: reward * transfer seconds * visits * (1 - sigmoid(idle)).

    The reward keeps enough adapters on the device. Low is the number of distinct adapters to be
    expected in a batch, the sum over adapters of 1 - (1 - share)^batch over the last `window`
    requests; Now is the number on the device. The paper prints min(1, Now/Low) for both
    directions; on eviction that would make adapters cheaper when there are too few. Here they
    become dearer then, max(1, Low/Now), as the text means it.

    Different from the paper: eviction happens when room is needed, not by a swapper every 100 ms
    that holds the pool between 70 % and full; a node is not cut into equal blocks; time is the
    logical clock, `ticks` of it a unit of idle time, and the 5 s of the window are requests. The
    weight of an adapter's priority is one more factor. As printed, a node is idle since its last
    visit, also while a request waits for it.

    Values are logarithms. The factor of idle time is taken relative to exp(-now / ticks), which
    changes no order and makes values rise with time where the printed ones all fall.
    """

    name = "elora"

    def __init__(
        self, prices: Prices | None = None, *, ticks: int = 24, window: int = 64, batch: int = 32
    ) -> None:
        self.prices = prices or Prices()
        self.ticks, self.batch = ticks, batch
        self._now = 0
        self._recent: deque[int] = deque(maxlen=window)
        self._seen: dict[int, AdapterNode] = {}
        self._since = 0
        self._bonus = 0.0
        self._changed = False

    def value(self, node: Node) -> float:
        """Logarithm of Eval, up to a term that all nodes share."""
        pages = len(node.pages) if node.pages or node.host is None else len(node.host.pages)
        size = pages * self.prices.page_bytes
        seconds = self.prices.rates.load_seconds(max(1, size))
        reward = self._bonus if isinstance(node, AdapterNode) else 0.0
        idle = _log_sum(-self._now / self.ticks, -node.used_at / self.ticks)
        return reward + math.log(seconds * max(1.0, node.uses) * weight(node)) - idle

    def used(self, node: Node, clock: int, *, again: bool) -> None:
        """One more visit."""
        self._now = max(self._now, clock)
        node.uses += 1.0
        node.used_at = clock
        if isinstance(node, AdapterNode):
            self._seen[node.serial] = node
            self._recent.append(node.serial)
            self._since += 1

    def loaded(self, adapter: AdapterNode, clock: int) -> None:
        """The time runs from the load."""
        self._now = max(self._now, clock)
        adapter.used_at = clock

    def evicted(self, node: Node, clock: int, pages: int, of: int) -> None:
        """Time goes on."""
        self._now = max(self._now, clock)

    def changed(self) -> bool:
        """Take the reward anew once a window."""
        if self._since < (self._recent.maxlen or 1):
            return False
        self._since = 0
        before, self._bonus = self._bonus, math.log(max(1.0, self._low() / self._present()))
        return before != self._bonus

    def _low(self) -> float:
        total = len(self._recent)
        counts = Counter(self._recent).values()
        return sum(1 - (1 - count / total) ** self.batch for count in counts)

    def _present(self) -> int:
        self._seen = {s: node for s, node in self._seen.items() if node.pages or not node.dropped}
        return max(1, sum(1 for node in self._seen.values() if node.pages))


def _log_sum(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    high, low = max(a, b), min(a, b)
    return high + math.log1p(math.exp(low - high))
