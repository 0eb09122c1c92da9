"""How nodes come to the device: weights by a load, KV by a promotion from the host."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_graft.cache.departures import Reason
from sglang_graft.cache.eviction import EvictablePages
from sglang_graft.cache.node import AdapterNode, Node, State
from sglang_graft.cache.shares import Share
from sglang_graft.pool.ledger import IN_FLIGHT, KV_CACHED, Owner


class TreePages(EvictablePages):
    """Brings nodes to the device, evicting for them what nobody holds."""

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
        adapter.last_forward = self.ledger.last_forward(pages)
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
        does. Returns None, with nothing changed, if there is no room now. Its path is as young as
        any then, or it would be the next victim. The node may be evicted or split before the copy
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
            clock = self._tick()
            step: Node | None = node
            while step is not None:
                step.last_use = clock
                self.policy.expected(step, clock)
                step = step.parent
            self._place(node, pages, self.ledger.last_forward(pages))
        self.unlock(parent)
        return pages

    def landed(self, pages: Sequence[int]) -> None:
        """The KV of IN_FLIGHT pages that still belong to their nodes is there."""
        self.ledger.move(pages, IN_FLIGHT, KV_CACHED)

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

    def _place(self, node: Node, pages: list[int], last_forward: int) -> None:
        """A KV node that had no pages gets some; its parent is on the device."""
        assert node.parent is not None, f"node {node.serial} was evicted"
        if node.adapter.share is not node.share:
            self._make_common(node.adapter)
        node.pages = pages
        node.last_forward = last_forward
        node.parent.device_children += 1
        node.adapter.kv_pages += len(pages)
        self._count_new(node, len(pages))
        self._settle(node)
