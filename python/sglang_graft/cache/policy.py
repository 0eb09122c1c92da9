"""Eviction policies: what a node is worth."""

from __future__ import annotations

from sglang_graft.cache.node import AdapterNode, Node

PRIORITY_TICKS = 1024
"""Under `lru`, how much later a node counts as used for each step of its adapter's priority."""
PRIORITY_WEIGHT = 2.0
"""Under other policies, by how much each step multiplies what a node is worth."""


class EvictionPolicy:
    """Orders the victims: the smallest value leaves first, equal values by creation order.

    `value` reads only the node and the policy's own state, never wall time or randomness. While
    the tree's shape stays as it is, a node's value may rise but not fall: the victim heap looks
    at a node again only when the value it was pushed with reaches the top. A policy that changes
    its prices at large says so in `changed`, or `UnifiedTree.reprice()` follows.

    The tree tells a policy what happens; a policy may keep `uses` and `used_at` on the nodes.

    Operators give adapters a priority, 0 for most. It weighs what the adapter and its KV are worth;
    it is no class of its own, so what nobody uses leaves at last whatever its priority.
    """

    name: str
    priced: bool = True
    """Whether values depend on prices, so that the order is taken anew when those change."""

    def value(self, node: Node) -> float:
        """What the node is worth now."""
        raise NotImplementedError

    def host_value(self, node: Node) -> float:
        """What its host copy is worth while it is, or would be, the only one; orders the host."""
        return self.value(node)

    def used(self, node: Node, clock: int, *, again: bool) -> None:
        """The node was created, or a request was admitted that reads it.

        again: the request goes on where the one before it on this path ended, so it is the next
        turn of a conversation and no new demand.
        """

    def expected(self, node: Node, clock: int) -> None:
        """A request that will read it has come and waits, or it is brought to the device for one:
        it is as young as any, and this is no visit."""

    def loaded(self, adapter: AdapterNode, clock: int) -> None:
        """An adapter got pages; nobody may have asked for it yet."""

    def evicted(self, node: Node, clock: int, pages: int, of: int) -> None:
        """The node, or its end, is about to leave for want of room: `pages` of it, while `of` pages
        in all might leave."""

    def changed(self) -> bool:
        """Whether prices changed at large since the last call; asked before each eviction."""
        return False


class Lru(EvictionPolicy):
    """Least recently used, on the logical clock of the tree."""

    name = "lru"
    priced = False

    def value(self, node: Node) -> float:
        """The clock of the last use, moved by the adapter's priority."""
        return node.last_use + PRIORITY_TICKS * node.adapter.priority

    host_value = value


def weight(node: Node) -> float:
    """What the adapter's priority multiplies the node's worth by; 1 at priority 0."""
    priority = node.adapter.priority
    return PRIORITY_WEIGHT**priority if priority else 1.0
