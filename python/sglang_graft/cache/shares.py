"""Whose the pages are: one share a tenant, with a floor that others leave alone and a cap.

A share holds the KV of its running requests, its cached KV, and the adapters that it alone uses.
What several tenants use (an adapter with KV of two of them, KV of a shared namespace) belongs to
the common share, which has neither floor nor cap; so what is below an adapter of a tenant's own is
that tenant's too, and all of its unlocked pages can leave.

The floor is a promise in pages: nobody else's need takes pages of a share beyond `held - floor`.
Weights leave whole, so up to one adapter more than the floor may be out of reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from heapq import merge
from itertools import islice

from sglang_graft.cache.node import AdapterNode, Entry, Node
from sglang_graft.cache.policy import EvictionPolicy
from sglang_graft.cache.victims import VictimHeap

COMMON = ""
"""Name of the share of what belongs to no tenant alone."""


class Share:
    """Pages of one tenant.

    floor: pages that others leave to it.   cap: pages that it may hold, None = any number.
    running: KV of running requests.   evictable, protected: pages in the tree, by lock.
    loose_weights: those of `evictable` that are weights.
    largest: most pages that one of its nodes had which leaves whole.
    """

    __slots__ = (
        "cap",
        "evictable",
        "floor",
        "largest",
        "loose_weights",
        "name",
        "protected",
        "running",
        "victims",
    )

    def __init__(self, name: str, policy: EvictionPolicy) -> None:
        self.name = name
        self.floor = 0
        self.cap: int | None = None
        self.running = 0
        self.evictable = 0
        self.protected = 0
        self.loose_weights = 0
        self.largest = 0
        self.victims = VictimHeap(policy)

    @property
    def held(self) -> int:
        """All pages of the share."""
        return self.running + self.evictable + self.protected

    def over_cap(self, pages: int = 0) -> int:
        """Pages above the cap once `pages` more have come; 0 or less is within it."""
        return 0 if self.cap is None else self.held + pages - self.cap

    def budget(self, incoming: int) -> int:
        """Pages that may leave it while `incoming` pages come to it."""
        return max(0, self.held - self.floor) + incoming

    def promised(self, incoming: int) -> int:
        """Pages that are certain to leave it when all of its budget is wanted."""
        budget = self.budget(incoming)
        if self.evictable <= budget:
            return self.evictable
        return max(0, budget - max(0, self.largest - 1))


Incoming = Mapping[Share, int]
"""Pages that shares are about to get; in exchange as many of theirs may leave."""

NOTHING: Incoming = {}


class Shares:
    """Every share of a tree, the common one first, in the order in which they were named."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self.common = Share(COMMON, policy)
        self._shares = {COMMON: self.common}
        self._floors = 0

    def __iter__(self) -> Iterator[Share]:
        return iter(self._shares.values())

    def get(self, name: str) -> Share:
        """The share of this name; a new one has no floor and no cap."""
        if name not in self._shares:
            self._shares[name] = Share(name, self._policy)
        return self._shares[name]

    def limit(self, limits: Mapping[str, tuple[int, int | None]]) -> None:
        """Set (floor, cap) of the named shares, in pages; all others lose theirs."""
        assert COMMON not in limits, "the common share has no floor and no cap"
        for name in limits:
            self.get(name)
        for share in self._shares.values():
            share.floor, share.cap = limits.get(share.name, (0, None))
        self._floors = sum(share.floor for share in self)

    def floors(self, *, without: Share | None = None) -> int:
        """Sum of all floors but that of `without`."""
        return self._floors - (without.floor if without is not None else 0)

    def promised(self, incoming: Incoming = NOTHING) -> int:
        """Pages that `UnifiedTree.evict` with the same `incoming` is certain to free at most."""
        if not self._floors:
            return sum(share.evictable for share in self)
        # KV that a floor protects may hold a common adapter above it.
        found = self.common.evictable - self.common.loose_weights
        others = islice(self._shares.values(), 1, None)
        return found + sum(share.promised(incoming.get(share, 0)) for share in others)

    def budgets(self, incoming: Incoming, only: Share | None) -> dict[Share, int]:
        """Pages that each share may give in one eviction."""
        if only is not None:
            return {only: only.evictable}
        return {share: share.budget(incoming.get(share, 0)) for share in self}

    def unfilled(self, *, without: Share) -> int:
        """Pages of floors that their tenants do not hold now."""
        if not self._floors:
            return 0
        return sum(max(0, s.floor - s.held) for s in self if s is not without)

    def reach(self, share: Share) -> int:
        """Pages that a request of `share` may count upon besides free ones; may be negative.

        All of its own, what others hold beyond their floors, less what others may still claim:
        a request that runs cannot give pages back, so it never takes what a floor will want.
        """
        if not self._floors:
            return self.promised()
        return self.promised({share: share.evictable}) - self.unfilled(without=share)


class ShareVictims:
    """The victims of all shares: a `VictimHeap` each, the smallest head next.

    A victim costs O(shares + log nodes).
    """

    def __init__(self, shares: Shares, leaves_whole: Callable[[Node], bool]) -> None:
        self._shares = shares
        self._leaves_whole = leaves_whole

    def __len__(self) -> int:
        return sum(len(share.victims) for share in self._shares)

    def push(self, node: Node) -> None:
        """Enter a node that became an evictable leaf."""
        node.share.victims.push(node)

    def pop(self, budgets: Mapping[Share, int]) -> Node | None:
        """Remove and return the least valuable leaf whose share may still give pages, or None.

        A node that leaves whole stays when its share may not give all of it; so do those behind it.
        """
        best: Entry | None = None
        for share, room in budgets.items():
            if room <= 0:
                continue
            head = share.victims.head()
            if head is None or (len(head[3].pages) > room and self._leaves_whole(head[3])):
                continue
            if best is None or head < best:
                best = head
        return None if best is None else best[3].share.victims.take(best)

    def coldest(self, limit: int) -> Iterator[Node]:
        """The victims that leave next, in order; looks at `limit` entries. Floors do not count.

        Lazy: victims must stay as they are meanwhile.
        """
        heads = [share.victims.coldest(limit) for share in self._shares]
        if len(heads) == 1:
            return heads[0]
        ordered = merge(*heads, key=lambda node: node.entry[:2] if node.entry else (0.0, 0))
        return islice(ordered, limit)

    def any_uncopied(self, limit: int) -> bool:
        """Whether `coldest` may yield a node without a host copy; False is certain."""
        return any(share.victims.any_uncopied(limit) for share in self._shares)

    def order(self) -> Iterator[Entry]:
        """Entries of all shares in rising order; see `VictimHeap.order`. Floors do not count."""
        return merge(*(share.victims.order() for share in self._shares))

    def forget(self, node: Node) -> None:
        """The node leaves the tree, or its share, by another way than `pop`."""
        node.share.victims.forget(node)

    def reshaped(self, node: Node) -> None:
        """The node lost a part."""
        node.share.victims.reshaped(node)

    def reprice(self) -> None:
        """Take every value anew. O(n)."""
        for share in self._shares:
            share.victims.reprice()

    def clear(self) -> None:
        """Drop every entry."""
        for share in self._shares:
            share.victims.clear()

    def live_serials(self) -> set[int]:
        """Serials of the nodes with a live entry. O(n), for checks."""
        return {serial for share in self._shares for serial in share.victims.live_serials()}

    def check_invariants(self) -> None:
        """Each order by itself, and every node in that of its own share."""
        for share in self._shares:
            share.victims.check_invariants()
            for node in share.victims.nodes():
                assert node.share is share, (
                    f"node {node.serial} of share {node.share.name!r} is ordered by {share.name!r}"
                )


def check(shares: Shares, nodes: list[Node], leaves_whole: Callable[[Node], bool]) -> None:
    """Assert that counters agree with a full walk, and who has the adapters above KV."""
    for share in shares:
        mine = [node for node in nodes if node.share is share]
        loose = [node for node in mine if node.lock == 0]
        evictable = sum(len(node.pages) for node in loose)
        protected = sum(len(node.pages) for node in mine) - evictable
        weights = sum(len(node.pages) for node in loose if isinstance(node, AdapterNode))
        counted = (share.evictable, share.protected, share.loose_weights)
        assert counted == (evictable, protected, weights), (
            f"share {share.name!r} counts {counted}, its nodes have"
            f" {(evictable, protected, weights)} (evictable, protected, loose weights)"
        )
        assert share.running >= 0, f"share {share.name!r} runs on {share.running} pages"
        most = max((len(node.pages) for node in loose if leaves_whole(node)), default=0)
        assert share.largest >= most, f"share {share.name!r}: {most} pages leave whole"
    for node in nodes:
        above = node.adapter.share
        assert not node.pages or above is node.share or above is shares.common, (
            f"node {node.serial} of {node.share.name!r} lies below an adapter of {above.name!r}"
        )
