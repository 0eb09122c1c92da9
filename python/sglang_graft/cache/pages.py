"""Pages of the tree's nodes: who is held, what may leave, and how nodes come back to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sglang_graft.cache.departures import Departures, Reason
from sglang_graft.cache.host import HostTier
from sglang_graft.cache.node import AdapterNode, Entry, Node, State
from sglang_graft.cache.policy import EvictionPolicy
from sglang_graft.cache.runs import TOKEN_BYTES, detach, split
from sglang_graft.cache.shares import NOTHING, Incoming, Share, Shares, ShareVictims
from sglang_graft.pool.ledger import IN_FLIGHT, KV_CACHED, Owner, PageLedger


def _nobody(pages: Sequence[int]) -> None:
    """Nobody copies: freed pages concern the ledger alone."""


class TreePages:
    """The device pages of nodes, their locks, eviction and promotion.

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
        if page_tokens < 1:
            raise ValueError(f"page_tokens: wanted 1 or more, got {page_tokens}")
        self.ledger = ledger
        self.page_tokens = page_tokens
        self.policy = policy
        self.shares = Shares(policy)
        self.host = None if host is None else HostTier(host, policy)
        self.on_freed: Callable[[Sequence[int]], None] = _nobody
        self.departures = Departures()
        self.evicted_adapters = 0
        self.demoted_pages = 0
        """Pages of KV that left the device and stay on the host."""
        self.dropped_pages = 0
        """Pages of KV that left the device for good."""
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._victims = ShareVictims(self.shares, self.leaves_whole)
        self._clock = 0
        self._serials = 0
        self._evictable = 0
        self._protected = 0

    # ---- what is held

    @property
    def clock(self) -> int:
        """The logical clock: one tick a match, insert or load."""
        return self._clock

    @property
    def evictable(self) -> int:
        """Pages of weights and KV that no request holds."""
        return self._evictable

    @property
    def protected(self) -> int:
        """Pages of weights and KV that a request holds."""
        return self._protected

    def lock(self, node: Node) -> None:
        """Hold a node, its path and its adapter until `unlock` of the same node."""
        assert node.parent is not None or node is node.adapter, f"node {node.serial} was evicted"
        step: Node | None = node
        moved = 0
        while step is not None:
            if step.lock == 0:
                moved += len(step.pages)
                self._change(step, -len(step.pages))
                step.share.protected += len(step.pages)
            step.lock += 1
            step = step.parent
        self._evictable -= moved
        self._protected += moved

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. The last unlock of a dropped adapter frees what it still has."""
        step: Node | None = node
        moved = 0
        while step is not None:
            assert step.lock > 0, f"node {step.serial} is unlocked more often than locked"
            step.lock -= 1
            if step.lock == 0:
                moved += len(step.pages)
                self._change(step, len(step.pages))
                step.share.protected -= len(step.pages)
                if step.is_victim():
                    self._victims.push(step)
            step = step.parent
        self._evictable += moved
        self._protected -= moved
        adapter = node.adapter
        if adapter.dropped and adapter.lock == 0:
            self._release(adapter)

    def use(self, node: Node) -> None:
        """Tell the policy that a request was admitted with this match; once for each request.

        Matches and locks come several times for a request that waits, so they do not count. Call
        it before the request's own KV is inserted.
        """
        again = node.whole and not node.children and node.parent is not None
        step: Node | None = node
        while step is not None:
            self.policy.used(step, self._clock, again=again)
            step = step.parent

    # ---- coming to the device

    def load(
        self,
        adapter: AdapterNode,
        *,
        use_reserve: bool = True,
        reason: Reason = Reason.ADAPTER,
        share: Share | None = None,
    ) -> list[int] | None:
        """Take pages for the weights of an absent adapter: state LOADING, owner IN_FLIGHT.

        They become pages of `share`, by default the common one. Evicts what is missing and may
        leave (see `evict`); with `use_reserve=False` the ledger's reserve stays free. Returns []
        if the adapter is not absent, and None, with nothing changed, if there is no room now. The
        caller copies into the pages and then calls `loaded`; if `adapter.pages` is no longer this
        list by then, the node was evicted meanwhile and the copy is void.
        """
        if adapter.dropped:
            raise ValueError(f"adapter {adapter.identity!r} was dropped: add it again to load it")
        if adapter.state is not State.ABSENT:
            return []
        # An absent adapter has no pages, and nothing below it has: no victim can be its own.
        assert not adapter.device_children, f"adapter {adapter.identity!r} is absent but has KV"
        share = share or self.shares.common
        pages = self._take(adapter.weight_pages, share, reason, use_reserve=use_reserve)
        if pages is None:
            return None
        adapter.share = share
        adapter.state = State.LOADING
        adapter.loads += 1
        adapter.pages = pages
        adapter.last_use = self._tick()
        self.policy.loaded(adapter, self._clock)
        self._count_new(adapter, len(pages))
        self._settle(adapter)
        return pages

    def loaded(self, adapter: AdapterNode) -> None:
        """The copy of a LOADING adapter has landed."""
        assert adapter.state is State.LOADING, f"{adapter.identity!r} is {adapter.state.value}"
        self.ledger.move(adapter.pages, IN_FLIGHT, Owner.ADAPTER)
        adapter.state = State.RESIDENT

    def promote(self, node: Node, *, use_reserve: bool = True) -> list[int] | None:
        """Take pages for KV that is on the host alone: owner IN_FLIGHT until `landed`.

        Its parent must be on the device or on its way, and its host copy readable. Evicts as `load`
        does. Returns None, with nothing changed, if there is no room now. Counts as a use of its
        path, or it would be the next victim. The node may be evicted or split before the copy
        lands; `landed` is for the pages that are still its own.
        """
        parent, copy = node.parent, node.host
        assert parent is not None, f"node {node.serial} was evicted"
        assert copy is not None, f"node {node.serial} has no host copy"
        assert not node.pages, f"node {node.serial} is on the device"
        assert parent.pages or parent is parent.adapter, f"node {node.serial}: its parent is absent"
        assert node.adapter.state is not State.ABSENT, f"{node.adapter.identity!r} is absent"
        self.lock(parent)  # what follows may evict, but not the path to this node
        pages = self._take(len(copy.pages), node.share, Reason.PROMOTION, use_reserve=use_reserve)
        if pages is not None:
            clock, step = self._tick(), node
            step.last_use = clock
            while step.parent is not None:
                step = step.parent
                step.last_use = clock
            self._place(node, pages)
        self.unlock(parent)
        return pages

    def landed(self, pages: Sequence[int]) -> None:
        """The KV of IN_FLIGHT pages that still belong to their nodes is there."""
        self.ledger.move(pages, IN_FLIGHT, KV_CACHED)

    def is_landed(self, node: Node) -> bool:
        """Whether a KV node is on the device with its bytes."""
        return bool(node.pages) and not self.ledger.holds(node.pages[0], IN_FLIGHT)

    # ---- leaving it

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
        Of KV larger than what is missing only the end goes; weights go whole. O(shares + log n) a
        victim. Never waits: what has a host copy keeps its place in the tree.
        """
        if pages <= 0:
            return 0
        if self.policy.changed():
            self.reprice()
        budgets = self.shares.budgets(incoming, only)
        freed = 0
        gone: dict[Owner, list[int]] = {KV_CACHED: [], IN_FLIGHT: []}
        while freed < pages:
            victim = self._victims.pop(budgets)
            if victim is None:
                break
            most = min(pages - freed, budgets[victim.share])
            count = self._expel(victim, most, self._evictable - freed, gone)
            freed += count
            budgets[victim.share] -= count
            self._note(reason, victim, count)
        for owner, run in gone.items():
            self._free(run, owner)
        self._evictable -= freed
        return freed

    def leaves_whole(self, node: Node) -> bool:
        """Whether eviction takes all of a node or nothing: weights, and KV on its way here."""
        return node is node.adapter or (node.host is not None and not self.is_landed(node))

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

    def _take(
        self, pages: int, share: Share, reason: Reason, *, use_reserve: bool
    ) -> list[int] | None:
        """Free pages, after evicting what is missing; None, and nothing evicted: no room.

        A share at its cap makes room for itself first.
        """
        kept = 0 if use_reserve else self.ledger.reserve
        incoming = {share: pages}
        over = share.over_cap(pages)
        if over > share.evictable:
            return None
        if pages > self.ledger.free - kept + self.shares.promised(incoming):
            return None
        if over > 0:
            self.evict(over, Reason.CAP, only=share)
        self.evict(pages - (self.ledger.free - kept), reason, incoming=incoming)
        taken = self.ledger.take(pages, IN_FLIGHT, use_reserve=use_reserve)
        assert taken is not None, f"{pages} pages were free, and could not be taken"
        return taken

    def _place(self, node: Node, pages: list[int]) -> None:
        """A KV node that had no pages gets some; its parent is on the device."""
        assert node.parent is not None, f"node {node.serial} was evicted"
        if node.adapter.share is not node.share:
            self._make_common(node.adapter)
        node.pages = pages
        node.parent.device_children += 1
        node.adapter.kv_pages += len(pages)
        self._count_new(node, len(pages))
        self._settle(node)

    def _count_new(self, node: Node, pages: int) -> None:
        share = node.share
        if self.leaves_whole(node) and pages > share.largest:
            share.largest = pages
        if node.lock:
            self._protected += pages
            share.protected += pages
        else:
            self._evictable += pages
            self._change(node, pages)
            if node.is_victim():
                self._victims.push(node)

    def _change(self, node: Node, pages: int) -> None:
        """`pages` more of an unlocked node's pages in the counters of its share."""
        node.share.evictable += pages
        if node is node.adapter:
            node.share.loose_weights += pages

    def _make_common(self, adapter: AdapterNode) -> None:
        """A second tenant uses an adapter: from now on it belongs to nobody alone."""
        common, pages = self.shares.common, len(adapter.pages)
        if adapter.share is common or adapter.identity is None:
            return
        self._victims.forget(adapter)
        if adapter.lock:
            adapter.share.protected -= pages
            common.protected += pages
            adapter.share = common
        else:
            self._change(adapter, -pages)
            adapter.share = common
            self._change(adapter, pages)
        common.largest = max(common.largest, pages)
        if adapter.is_victim():
            self._victims.push(adapter)

    def _expel(self, victim: Node, most: int, of: int, gone: dict[Owner, list[int]]) -> int:
        """Take a popped victim off the device, of KV about `most` pages at its end; returns how
        many. Pages of KV go to `gone` by owner; the caller frees them. `of`: pages that may leave.
        """
        held = len(victim.pages)
        leaving = held if self.leaves_whole(victim) else min(held, most)
        self.policy.evicted(victim, self._clock, leaving, of)
        if isinstance(victim, AdapterNode):
            victim.evictions += 1
            self.evicted_adapters += 1
            return self._unload(victim)
        owner = self._owner(victim)
        pages = self._cut(victim, most)
        victim.share.evictable -= len(pages)
        gone[owner] += pages
        return len(pages)

    def _cut(self, victim: Node, wanted: int) -> list[int]:
        """Take up to `wanted` pages off the end of a popped victim; the caller frees and counts."""
        keep = max(0, len(victim.pages) - wanted)
        if victim.host is None:
            return self._lose(victim, keep)
        if keep and self.is_landed(victim):
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
        self._free(pages, Owner.ADAPTER if landed else IN_FLIGHT)
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

    def _free(self, pages: Sequence[int], owner: Owner) -> None:
        """Give pages that leave their nodes back."""
        if pages:
            self.on_freed(pages)
            self.ledger.give(pages, owner)

    def _owner(self, node: Node) -> Owner:
        """Who has the pages of a KV node on the device, in the ledger's words."""
        return KV_CACHED if self.is_landed(node) else IN_FLIGHT

    def _split(self, lower: Node, size: int) -> Node:
        """Put the first `size` bytes of a node into one above it, which is returned."""
        upper = split(lower, self._next_serial(), size, self._page_bytes)
        self._settle(upper)
        self._victims.reshaped(lower)
        if self.host is not None:
            self.host.reshaped(lower)
        return upper

    def _settle(self, node: Node) -> None:
        if self.host is not None and node.host is not None:
            self.host.settle(node)

    def _release(self, adapter: AdapterNode) -> int:
        raise NotImplementedError

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _next_serial(self) -> int:
        self._serials += 1
        return self._serials
