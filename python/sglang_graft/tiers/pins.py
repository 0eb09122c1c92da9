"""Adapters that stay on the device: each pin is one lock on the adapter's node."""

from dataclasses import dataclass, field

from sglang_graft.cache import AdapterNode, Reason, State, UnifiedTree


@dataclass(slots=True)
class Pins:
    """Holds the nodes of pinned registrations, so that eviction passes them by.

    The tree counts a pinned adapter's weights as protected, like those that a request holds. KV
    below it is evicted as usual. Several registrations of equal weights may pin one node.
    """

    tree: UnifiedTree
    _held: dict[str, AdapterNode] = field(default_factory=dict)

    def ids(self) -> list[str]:
        """The pinned registrations, in the order in which they were pinned."""
        return list(self._held)

    def pages(self, *, without: AdapterNode | None = None) -> int:
        """Pages of pinned weights, each node once; those of `without` are not counted."""
        nodes = {node.serial: node for node in self._held.values() if node is not without}
        return sum(node.weight_pages for node in nodes.values())

    def nodes(self) -> list[AdapterNode]:
        """The pinned nodes, each once, in the order in which they were pinned."""
        if not self._held:
            return []
        return list({node.serial: node for node in self._held.values()}.values())

    def count(self, node: AdapterNode) -> int:
        """Pins on one node."""
        return sum(held is node for held in self._held.values())

    def take(self, adapter_id: str, node: AdapterNode) -> bool:
        """Promote and hold `node`; False, with nothing changed, when there is no room now."""
        assert adapter_id not in self._held, f"adapter id {adapter_id} is pinned already"
        if self.tree.load(node, reason=Reason.PIN) is None:
            return False
        self.tree.lock(node)
        self._held[adapter_id] = node
        return True

    def give(self, adapter_id: str) -> bool:
        """Release a pin; False when there was none."""
        node = self._held.pop(adapter_id, None)
        if node is not None:
            self.tree.unlock(node)
        return node is not None

    def reset(self) -> None:
        """Reset the tree and promote the pinned adapters anew. No request may hold anything."""
        held, self._held = self._held, {}
        for node in held.values():
            self.tree.unlock(node)
        self.tree.reset()
        for adapter_id, node in held.items():
            taken = self.take(adapter_id, node)
            assert taken, f"{node.weight_pages} pinned pages do not fit into an empty pool"

    def check_invariants(self) -> None:
        """Assert that every pinned node is locked and has its pages."""
        for adapter_id, node in self._held.items():
            assert node.lock >= self.count(node), (
                f"{adapter_id}: {node.lock} locks, fewer than pins"
            )
            assert node.state is not State.ABSENT, f"pinned adapter {adapter_id} is absent"
