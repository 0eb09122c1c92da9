"""The modelled host tier: what would come back by a copy instead of a read or a forward.

It is the unified tree once more, over a ledger of host pages and with its own policy object: an
adapter node is an image in host memory, a KV node is a copy of KV. Every committed page is written
through, and so is the image of an adapter that lost it while it was on the device; so nothing has
to be saved when the device evicts it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol

from sglang_graft.cache import AdapterNode, EvictionPolicy, Node, State, UnifiedTree
from sglang_graft.pool.ledger import Owner, PageLedger


class Host(Protocol):
    """What replay asks of a host tier."""

    def read(self, name: str) -> bool:
        """An image is wanted: True if it was read from the disk now, False if it was here."""

    def cached(self, name: str, tokens: array[int]) -> int:
        """Leading tokens whose KV is here, for an admitted request."""

    def commit(self, name: str, tokens: array[int]) -> None:
        """KV of these whole pages was computed; copies of it are kept while there is room."""

    def holds(self, node: Node) -> bool:
        """Whether a node of the device's tree would come back from here."""

    def check_invariants(self) -> None:
        """Assert that the host's pages add up."""


class NoHost:
    """No host tier: adapters are read from the disk each time, KV is computed again."""

    def read(self, name: str) -> bool:
        """Always from the disk."""
        return True

    def cached(self, name: str, tokens: array[int]) -> int:
        """Nothing."""
        return 0

    def commit(self, name: str, tokens: array[int]) -> None:
        """Forgotten."""

    def holds(self, node: Node) -> bool:
        """It would not."""
        return False

    def check_invariants(self) -> None:
        """There are no pages."""


@dataclass(slots=True)
class HostTree:
    """A host pool of `pages`, inclusive of the device."""

    tree: UnifiedTree

    @classmethod
    def of(
        cls, pages: int, page_tokens: int, policy: EvictionPolicy, sizes: dict[str, int]
    ) -> HostTree:
        """An empty pool that knows the adapters of `sizes` (pages by name).

        ValueError when the largest adapter does not fit.
        """
        largest = max(sizes.values(), default=0)
        if pages <= largest:
            raise ValueError(
                f"--host-gb: wanted more than {largest} pages, the largest adapter; got {pages}. "
                "0 is no host tier"
            )
        tree = UnifiedTree(PageLedger(pages + 1), page_tokens=page_tokens, policy=policy)
        for name, size in sizes.items():
            tree.add_adapter(name, size)
        return cls(tree)

    def read(self, name: str) -> bool:
        """See Host."""
        return self._present(self._node(name))

    def cached(self, name: str, tokens: array[int]) -> int:
        """See Host."""
        match = self.tree.match(self._node(name), tokens)
        self.tree.use(match.node)
        return len(match.pages) * self.tree.page_tokens

    def commit(self, name: str, tokens: array[int]) -> None:
        """See Host. What does not fit is not kept, and nothing is pushed out for it in vain."""
        tree, adapter = self.tree, self._node(name)
        self._present(adapter)
        match = tree.match(adapter, tokens)
        tree.lock(match.node)
        start = len(match.pages) * tree.page_tokens
        missing = len(tokens) // tree.page_tokens - len(match.pages)
        if missing <= tree.ledger.free + tree.evictable:
            tree.evict(missing - tree.ledger.free)
            pages = tree.ledger.take(missing, Owner.KV_RUNNING)
            assert pages is not None, f"{missing} host pages were free, and could not be taken"
            tree.insert(adapter, tokens, pages, start=start)
        tree.unlock(match.node)

    def holds(self, node: Node) -> bool:
        """See Host. KV is taken to be here, as it was written through; images are looked up."""
        if not isinstance(node, AdapterNode) or node.identity is None:
            return True
        return self._node(node.identity).state is not State.ABSENT

    def check_invariants(self) -> None:
        """See Host."""
        self.tree.check_invariants()
        self.tree.ledger.check_invariants()

    def _node(self, name: str) -> AdapterNode:
        node = self.tree.adapter(name)
        assert node is not None, f"adapter {name} is not registered"
        return node

    def _present(self, adapter: AdapterNode) -> bool:
        if adapter.state is not State.ABSENT:
            return False
        pages = self.tree.load(adapter)
        assert pages is not None, f"the host has no room for adapter {adapter.identity}"
        self.tree.loaded(adapter)
        return True
