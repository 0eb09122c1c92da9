"""The cost model: seconds to bring a node back, for each page, times how often it is wanted."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_graft.cache.node import AdapterNode, Node
from sglang_graft.cache.policy import EvictionPolicy
from sglang_graft.cache.rates import Rates

# A price of 0 would make a node worthless however often it is wanted.
_LEAST_S = 1e-12


class Tier(enum.Enum):
    """Which memory a policy orders."""

    DEVICE = "device"
    HOST = "host"


def nowhere(node: Node) -> bool:
    """No node has a host copy."""
    return False


@dataclass(slots=True)
class Prices:
    """Seconds for a page of a node to come back to the device after it left `tier`.

    From the device: a copy of what the host has; otherwise adapters are read from the disk and
    copied, and KV is computed again, at its depth, if that is not cheaper than the copy anyway.
    From the host: the difference that the host copy makes.

    rates: prices of this window; after a change call `UnifiedTree.reprice()`.
    in_host: whether a node has a host copy; where its answer turns to True for a node on the
    device, call `UnifiedTree.revalue`.
    """

    page_bytes: int = 2**21
    page_tokens: int = 16
    rates: Rates = field(default_factory=Rates)
    tier: Tier = Tier.DEVICE
    in_host: Callable[[Node], bool] = nowhere

    def seconds_per_page(self, node: Node) -> float:
        """Seconds for each page of the node; more than 0."""
        rates, copy = self.rates, self.rates.h2d(self.page_bytes)
        if isinstance(node, AdapterNode):
            read = rates.disk(self.page_bytes)
            if self.tier is Tier.HOST:
                return read
            return copy if self.in_host(node) else read + copy
        compute = self._compute(node)
        if self.tier is Tier.HOST:
            return max(compute - copy, _LEAST_S)
        return min(copy, compute) if self.in_host(node) else compute

    def _compute(self, node: Node) -> float:
        tokens, pages = self.page_tokens, max(1, len(node.pages))
        return self.rates.prefill(pages * tokens, node.start * tokens) / pages


class Cost(EvictionPolicy):
    """GreedyDual over seconds per page, with an aged count of uses.

    value = level at the last use + uses * seconds for a page. The level is the largest value that
    ever left (Cao and Irani's inflation): a node that is not used keeps its value while the level
    rises past it. So a node lives for `uses` times its price, on the clock of what the pool has to
    give up, which runs as fast as the pool turns over; nothing has to be tuned to a size or rate.

    uses: 1 at the start; a further use adds 1 to what is left of the count, which halves each
    time the level rises by the node's price. A page wanted every 1/k of its life gets to about
    1.44 k, so `uses` estimates a rate of reuse, as the frequency in GDSF does, and forgets. An
    adapter keeps its count while it is off the device.

    A next turn of a conversation (`again`) makes the path as fresh as a first one but adds nothing
    to the count: turns come in a row and then stop, and an adapter or a shared prompt would be
    taken for popular after each of them. A host tier counts them (`count_turns`): it turns over
    in minutes, and turns are the requests that it saves from the disk.
    """

    name = "cost"

    def __init__(self, prices: Prices | None = None, *, count_turns: bool | None = None) -> None:
        self.prices = prices or Prices()
        self.level = 0.0
        in_host = self.prices.tier is Tier.HOST
        self.count_turns = in_host if count_turns is None else count_turns

    def value(self, node: Node) -> float:
        """Level below which it does not fall."""
        return node.used_at + max(1.0, node.uses) * self.prices.seconds_per_page(node)

    def used(self, node: Node, clock: int, *, again: bool) -> None:
        """Count it, and make it as young as any."""
        aged = self._aged(node)
        counts = self.count_turns or not again or not node.uses
        node.uses = aged + 1.0 if counts else max(1.0, aged)
        node.used_at = self.level

    def loaded(self, adapter: AdapterNode, clock: int) -> None:
        """Make it as young as any: what was just paid for is not what leaves next."""
        adapter.uses = self._aged(adapter)
        adapter.used_at = self.level

    def evicted(self, node: Node, clock: int) -> None:
        """Raise the level."""
        self.level = max(self.level, self.value(node))

    def _aged(self, node: Node) -> float:
        if not node.uses:
            return 0.0
        idle = (self.level - node.used_at) / self.prices.seconds_per_page(node)
        return float(node.uses * 0.5**idle)
