"""Promotion while nobody waits: what was used most comes back into pages that are free anyway."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_graft.cache import AdapterNode, Node, State, UnifiedTree
from sglang_graft.cache.runs import below
from sglang_graft.tiers.copies import Way
from sglang_graft.tiers.counters import Counters
from sglang_graft.tiers.transfers import Transfers


@dataclass(slots=True)
class IdlePromotion:
    """Loads adapters, then KV below those on the device, without evicting anything.

    Uses free pages beyond the ledger's reserve, about `under_way` pages at a time. The latest used
    come first. A pass costs O(adapters), or O(nodes of one adapter).
    """

    tree: UnifiedTree
    transfers: Transfers
    counters: Counters
    under_way: int = 64

    def run(self) -> None:
        """One pass without waiting requests."""
        if self.transfers.pages_under_way(Way.LOAD) >= self.under_way:
            return
        if self.tree.ledger.free <= self.tree.ledger.reserve:
            return  # the usual case: what has left is asked for again before it comes back
        for node in self._candidates():
            assert node.host is not None, f"node {node.serial} has no host copy to promote"
            pages = len(node.host.pages)
            if pages > self.tree.ledger.free - self.tree.ledger.reserve:
                continue
            if node.share.over_cap(pages) > 0:
                continue
            if isinstance(node, AdapterNode):
                taken = self.tree.load(node, use_reserve=False)
                self.counters.add(node.identity, loads=1)
            else:
                taken = self.tree.promote(node, use_reserve=False)
                self.counters.add(node.adapter.identity, promotions=1)
            assert taken is not None, f"{len(node.host.pages)} pages were free, and are not"
            self.transfers.load(node)
            self.counters.add(node.adapter.identity, pages_to_device=len(taken))
            return

    def _candidates(self) -> Iterator[Node]:
        host = self.tree.host
        assert host is not None, "idle promotion needs a host tier"
        adapters = sorted(self.tree.adapters(), key=lambda a: (-a.last_use, a.serial))
        for adapter in adapters:
            if adapter.state is State.ABSENT and host.is_readable(adapter):
                yield adapter
        for adapter in adapters:
            if adapter.state is not State.RESIDENT or not adapter.host_kv_pages:
                continue
            for node in sorted(below(adapter), key=lambda n: (-n.last_use, n.serial)):
                parent = node.parent
                above = parent is adapter or (parent is not None and bool(parent.pages))
                if not node.pages and above and host.is_readable(node):
                    yield node
