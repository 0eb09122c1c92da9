"""The cost model: seconds to bring a node back, for each page, times how often it is wanted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_graft.cache.node import AdapterNode, Node
from sglang_graft.cache.policy import EvictionPolicy, weight
from sglang_graft.cache.rates import Rates
from sglang_graft.cache.runs import TOKEN_BYTES

# A price of 0 would make a node worthless however often it is wanted.
_LEAST_S = 1e-12
# Shapes of nodes whose price is remembered.
_KNOWN_MOST = 2**16


class Price(NamedTuple):
    """Seconds for each page of a node, more than 0 each.

    device: when it leaves the device.   host: what its host copy saves.   lost: to bring it back
    from nowhere.
    """

    device: float
    host: float
    lost: float


@dataclass(slots=True)
class Prices:
    """Seconds for a page of a node to come back to the device.

    From nowhere: weights are read from the disk and copied, KV is computed again at its depth. With
    a host tier, what leaves the device comes back by a copy: write-back is ahead of eviction, so
    whether a node has its copy already is no matter of the node. What leaves the host is lost; its
    copy is worth the difference.

    host_kv: whether KV is copied to the host too (`host_tier`: adapters are).
    rates: prices of this window; after a change call `UnifiedTree.reprice()`. The other fields
    stay as they are.
    """

    page_bytes: int = 2**21
    page_tokens: int = 16
    host_tier: bool = False
    host_kv: bool = True
    rates: Rates = field(default_factory=Rates)
    _known: dict[tuple[int, int], Price] = field(default_factory=dict, init=False, repr=False)
    _known_for: Rates | None = field(default=None, init=False, repr=False)

    def of(self, node: Node) -> Price:
        """The prices of a node at the rates of this window."""
        # Values are asked for at every look at a victim, so shapes that were seen are kept. Weights
        # have no key.
        shape = (len(node.key), node.start)
        if self._known_for is not self.rates or len(self._known) > _KNOWN_MOST:
            self._known, self._known_for = {}, self.rates
        found = self._known.get(shape)
        if found is None:
            found = self._known[shape] = self._price(node)
        return found

    def _price(self, node: Node) -> Price:
        copy = self.rates.load_seconds(self.page_bytes)
        if node is node.adapter:
            lost, copied = self.rates.read_seconds(self.page_bytes) + copy, self.host_tier
        else:
            tokens = len(node.key) // TOKEN_BYTES
            assert tokens, f"KV node {node.serial} has no tokens"
            seconds = self.rates.prefill_seconds(tokens, node.start * self.page_tokens)
            lost = seconds / max(1, tokens // self.page_tokens)
            copied = self.host_tier and self.host_kv
        return Price(min(copy, lost) if copied else lost, max(lost - copy, _LEAST_S), lost)


class Cost(EvictionPolicy):
    """Recency in seconds: GreedyDual over seconds per page, with a short memory of reuse.

    value = level at the last use + uses * seconds for a page. The level measures age by what the
    pool has to give up: each page that leaves raises it by its price over the pages that might have
    left. So it rises by the mean price each time the pool turns over, and a node that nobody uses
    stays for as many turnovers as its price is above the mean; nothing is tuned to a size or rate.
    Where all prices are equal the order is that of the last use. (The level of Cao and Irani, the
    largest value that ever left, jumps by a whole price at once: then it does not tell the uses of
    a whole turnover apart, and lost to plain recency where prices hardly differ.)

    uses: 1 at the start, 1 more with each use, up to `most_uses`; it falls by 1 each time the level
    rises by what the node costs from nowhere, to 1 at least. What was wanted again within its life
    gets a longer one, and loses it when that ends. Larger caps save more where popularity stands
    still, and lose to plain recency where it moves (docs/replay.md). An adapter keeps its count
    while it is off the device. Values never fall between uses or by a use.

    The weight of the adapter's priority multiplies the price.

    A next turn of a conversation (`again`) makes its path as fresh as a first one but adds nothing
    to the count: turns come in a row and then stop, and an adapter or a shared prompt would be
    taken for popular after each of them.
    """

    name = "cost"

    def __init__(self, prices: Prices | None = None, *, most_uses: float = 1.5) -> None:
        if not most_uses >= 1:
            raise ValueError(f"most_uses: wanted 1 or more, got {most_uses}")
        self.prices = prices or Prices()
        self.most_uses = most_uses
        self.level = 0.0

    def value(self, node: Node) -> float:
        """Level below which it does not fall."""
        price = self.prices.of(node)[0] * weight(node)
        return node.used_at + (node.uses if node.uses > 1.0 else 1.0) * price

    def host_value(self, node: Node) -> float:
        """The same with what the host copy saves."""
        price = self.prices.of(node)[1] * weight(node)
        return node.used_at + (node.uses if node.uses > 1.0 else 1.0) * price

    def used(self, node: Node, clock: int, *, again: bool) -> None:
        """Count it, and make it as young as any."""
        aged = self._aged(node)
        self._renew(node, max(1.0, aged) if again else min(aged + 1.0, self.most_uses))

    def expected(self, node: Node, clock: int) -> None:
        """Make it as young as any."""
        self._renew(node, self._aged(node))

    def loaded(self, adapter: AdapterNode, clock: int) -> None:
        """Make it as young as any: what was just paid for is not what leaves next."""
        self._renew(adapter, self._aged(adapter))

    def evicted(self, node: Node, clock: int, pages: int, of: int) -> None:
        """Raise the level."""
        self.level += self.prices.of(node).device * weight(node) * pages / of

    def _renew(self, node: Node, uses: float) -> None:
        """As young as any, with this count. Where that fell, rounding may not lower a value."""
        least, least_host = self.value(node), self.host_value(node)
        fell = uses < node.uses
        node.uses, node.used_at = uses, self.level
        while fell and (self.value(node) < least or self.host_value(node) < least_host):
            node.used_at += math.ulp(max(least, least_host))

    def _aged(self, node: Node) -> float:
        if not node.uses:
            return 0.0
        price = self.prices.of(node).lost * weight(node)
        idle = (self.level - node.used_at) / price
        return max(0.0, node.uses - idle)
