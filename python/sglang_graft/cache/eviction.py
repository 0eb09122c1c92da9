"""What leaves the device when pages are wanted, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sglang_graft.cache.departures import Departures, Reason
from sglang_graft.cache.held import HeldPages
from sglang_graft.cache.node import AdapterNode, Entry, Node, State
from sglang_graft.cache.policy import EvictionPolicy
from sglang_graft.cache.runs import TOKEN_BYTES, detach, split
from sglang_graft.cache.shares import NOTHING, Incoming, Share
from sglang_graft.pool.ledger import IN_FLIGHT, KV_CACHED, Owner, PageLedger

GROUP = 8
"""Pages between the places where eviction cuts KV with a host copy in two."""


def _nobody(pages: Sequence[int]) -> None:
    """Nobody copies: freed pages concern the ledger alone."""


class EvictablePages(HeldPages):
    """Takes nodes off the device.

    With a `host` tier, a KV node that leaves the device keeps its place in the tree as long as it
    has a host copy; without one it is forgotten.

    `on_freed` is told of every page that leaves a node, before anybody else can take it: a copy may
    still be reading or writing it, and whoever writes it next has to come after that copy.
    """

    def __init__(
        self,
        ledger: PageLedger,
        *,
        page_tokens: int,
        policy: EvictionPolicy,
        host: PageLedger | None = None,
    ) -> None:
        super().__init__(ledger, page_tokens=page_tokens, policy=policy, host=host)
        self.on_freed: Callable[[Sequence[int]], None] = _nobody
        self.departures = Departures()
        self.evicted_adapters = 0
        self.demoted_pages = 0
        """Pages of KV that left the device and stay on the host."""
        self.dropped_pages = 0
        """Pages of KV that left the device for good."""
        self._page_bytes = page_tokens * TOKEN_BYTES

    def evict(
        self,
        pages: int,
        reason: Reason = Reason.REQUEST,
        *,
        incoming: Incoming = NOTHING,
        only: Share | None = None,
    ) -> int:
        """Free at least `pages` pages, or all that may leave; returns how many.

        What may leave is what no request holds: of each share what it holds beyond its floor, and
        as many pages as it gets (`incoming`); or anything of one share (`only`). Takes the least
        valuable leaf first: KV with none below it on the device, or an adapter without KV there.
        Of KV larger than what is missing only the end goes (`leaving`); weights go whole.
        O(shares + log n) a victim. Never waits: what has a host copy keeps its place in the tree.
        """
        if pages <= 0:
            return 0
        if self.policy.changed():
            self.reprice()
        budgets = self.shares.budgets(incoming, only)
        freed = last_forward = 0
        gone: dict[Owner, list[int]] = {KV_CACHED: [], IN_FLIGHT: []}
        while freed < pages:
            victim = self._victims.pop(budgets)
            if victim is None:
                break
            leaving = self.leaving(victim, pages - freed, budgets[victim.share])
            count = self._expel(victim, leaving, self._evictable - freed, gone)
            freed += count
            last_forward = max(last_forward, victim.last_forward)
            budgets[victim.share] -= count
            self._note(reason, victim, count)
        for owner, run in gone.items():
            self._free(run, owner, last_forward)
        self._evictable -= freed
        return freed

    def leaving(self, victim: Node, wanted: int, room: int) -> int:
        """How many pages of a victim leave when `wanted` are missing and its share may give `room`.

        KV with a host copy stays as two nodes, so it is cut where whole groups of GROUP pages of
        its sequence end, if the share may give the pages more that this takes. Otherwise a path
        that often comes and goes would end as one node a page, each with transfers of its own.
        """
        count = len(victim.pages)
        exact = min(count, wanted, room)
        if exact == count or self.leaves_whole(victim):
            return count
        if victim.host is None:
            return exact
        keep = count - exact
        rounded = exact + min(keep, (victim.start + keep) % GROUP)
        return rounded if rounded <= room else exact

    def coldest(self, limit: int) -> Iterator[Node]:
        """What eviction would take next, in order; looks at `limit` entries of that order.

        Lazy: what is on the device and who holds it must stay as it is meanwhile.
        """
        return self._victims.coldest(limit)

    def any_uncopied(self, limit: int) -> bool:
        """Whether `coldest` may name a node without a host copy; False is certain, and cheap."""
        return self._victims.any_uncopied(limit)

    def victim_order(self) -> Iterator[Entry]:
        """Entries of the victims in rising order; see `VictimHeap.order`."""
        return self._victims.order()

    def reprice(self) -> None:
        """Order the victims anew after the policy changed its prices. O(n)."""
        self._victims.reprice()
        if self.host is not None:
            self.host.reprice()

    # ---- internals

    def _expel(self, victim: Node, leaving: int, of: int, gone: dict[Owner, list[int]]) -> int:
        """Take a popped victim off the device, of KV `leaving` pages at its end; returns how many.
        Pages of KV go to `gone` by owner; the caller frees them. `of`: pages that may leave.
        """
        owner = IN_FLIGHT if self.leaves_whole(victim) else KV_CACHED
        self.policy.evicted(victim, self._clock, leaving, of)
        if isinstance(victim, AdapterNode):
            victim.evictions += 1
            self.evicted_adapters += 1
            return self._unload(victim)
        pages = self._cut(victim, leaving)
        victim.share.evictable -= len(pages)
        gone[owner] += pages
        return len(pages)

    def _cut(self, victim: Node, wanted: int) -> list[int]:
        """Take `wanted` pages off the end of a popped victim; the caller frees and counts."""
        keep = len(victim.pages) - wanted
        if victim.host is None:
            return self._lose(victim, keep)
        if keep:
            self._split(victim, keep * self._page_bytes)
        gone = self._lift(victim)
        self.demoted_pages += len(gone)
        victim.adapter.demoted_pages += len(gone)
        self._settle(victim)
        return gone

    def _lose(self, victim: Node, keep: int) -> list[int]:
        """Forget all but the first `keep` pages of KV without a host copy."""
        assert not victim.children, f"node {victim.serial} has children on the host, and no copy"
        gone = victim.pages[keep:]
        self.dropped_pages += len(gone)
        victim.adapter.dropped_pages += len(gone)
        if not keep:
            self._lift(victim)
            detach(victim)
            return gone
        victim.adapter.kv_pages -= len(gone)
        victim.pages = victim.pages[:keep]
        victim.key = victim.key[: keep * self._page_bytes]
        victim.whole = False
        self._victims.push(victim)
        return gone

    def _split(self, lower: Node, size: int) -> Node:
        """Put the first `size` bytes of a node into one above it, which is returned."""
        upper = split(lower, self._next_serial(), size, self._page_bytes)
        self._settle(upper)
        self._victims.reshaped(lower)
        if self.host is not None:
            self.host.reshaped(lower)
        return upper

    def _lift(self, node: Node) -> list[int]:
        """Take a KV node's pages off it; the caller frees and counts them."""
        parent = node.parent
        assert parent is not None, f"node {node.serial} was evicted before"
        assert node.pages, f"node {node.serial} is not on the device"
        gone, node.pages = node.pages, []
        node.left = self._clock
        node.adapter.kv_pages -= len(gone)
        parent.device_children -= 1
        if parent.is_victim():
            self._victims.push(parent)
        return gone

    def _unload(self, adapter: AdapterNode) -> int:
        """Free the weights, landed or not; the caller counts them. The base model has none."""
        if adapter.identity is None:
            return 0
        pages, adapter.pages = adapter.pages, []
        self._change(adapter, -len(pages))
        landed = adapter.state is State.RESIDENT
        self._free(pages, Owner.ADAPTER if landed else IN_FLIGHT, adapter.last_forward)
        adapter.state = State.ABSENT
        adapter.left = self._clock
        self._settle(adapter)
        return len(pages)

    def _note(self, reason: Reason, node: Node, pages: int) -> None:
        self.departures.note(
            self._clock,
            reason,
            node.adapter.identity,
            pages,
            weights=node is node.adapter,
            kept=node.host is not None,
        )

    def _free(self, pages: Sequence[int], owner: Owner, last_forward: int) -> None:
        """Give pages that leave their nodes back; see `PageLedger.give`."""
        if pages:
            self.on_freed(pages)
            self.ledger.give(pages, owner, last_forward=last_forward)

    def _owner(self, node: Node) -> Owner:
        """Who has the pages of a KV node on the device, in the ledger's words."""
        return KV_CACHED if self.is_landed(node) else IN_FLIGHT
