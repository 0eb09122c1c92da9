"""Which pages of the tree's nodes are held: locks, uses, and what each share has."""

from __future__ import annotations

from sglang_graft.cache.host import HostTier
from sglang_graft.cache.node import AdapterNode, Node
from sglang_graft.cache.policy import EvictionPolicy
from sglang_graft.cache.shares import Shares, ShareVictims
from sglang_graft.pool.ledger import IN_FLIGHT, PageLedger


class HeldPages:
    """The device pages of nodes by who holds them: a request (a lock), or nobody.

    Every page that nobody holds is counted as evictable, and each leaf of such pages has its place
    in the order of victims.
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
        self._victims = ShareVictims(self.shares, self.leaves_whole)
        self._clock = 0
        self._serials = 0
        self._evictable = 0
        self._protected = 0

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
                pages = len(step.pages)
                moved += pages
                self._change(step, -pages)
                step.share.protected += pages
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
                step.last_forward = self.ledger.forwards
                pages = len(step.pages)
                moved += pages
                self._change(step, pages)
                step.share.protected -= pages
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

    def is_landed(self, node: Node) -> bool:
        """Whether a KV node is on the device with its bytes."""
        return bool(node.pages) and not self.ledger.holds(node.pages[0], IN_FLIGHT)

    def leaves_whole(self, node: Node) -> bool:
        """Whether eviction takes all of a node or nothing: weights, and KV on its way here."""
        return node is node.adapter or (node.host is not None and not self.is_landed(node))

    # ---- internals

    def _count_new(self, node: Node, pages: int) -> None:
        share = node.share
        if pages > share.largest and self.leaves_whole(node):
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

    def _settle(self, node: Node) -> None:
        """Tell the host side that the node came, left or was used."""
        if self.host is not None and node.host is not None:
            self.host.settle(node)

    def _release(self, adapter: AdapterNode) -> int:
        """Free what nobody holds of a dropped adapter: for the tree, which knows what it has."""
        raise NotImplementedError

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _next_serial(self) -> int:
        self._serials += 1
        return self._serials
