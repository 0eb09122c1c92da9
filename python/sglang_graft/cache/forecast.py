"""What a load would evict, found out without taking anything."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_graft.cache.node import Entry, Node
from sglang_graft.cache.pages import TreePages
from sglang_graft.cache.shares import Share


class Loss(NamedTuple):
    """A node and how many of its device pages it would lose: all, or the end of its KV."""

    node: Node
    pages: int


class Forecast(NamedTuple):
    """`missing` pages cannot be found now, or `losses` in the order in which they would leave."""

    missing: int
    losses: list[Loss]


def forecast(
    tree: TreePages, pages: int, *, use_reserve: bool = True, held: Sequence[Node] = ()
) -> Forecast:
    """What `UnifiedTree.load` of an absent adapter with `pages` pages would find and evict now.

    The pages would be those of the common share. `held` are nodes that the caller would lock
    meanwhile. Costs O(log n) for each entry of the victims' order that it has to look at, no walk
    of the tree. Exact for policies whose prices stand still between two events (lru, cost); elora
    may take its reward anew before it evicts.
    """
    kept = _paths(held)
    room = tree.ledger.free - (0 if use_reserve else tree.ledger.reserve)
    spared = sum(len(node.pages) for node in kept.values() if node.lock == 0)
    incoming = {tree.shares.common: pages}
    missing = pages - room - (tree.shares.promised(incoming) - spared)
    if missing > 0:
        return Forecast(missing, [])
    return _Walk(tree, set(kept), tree.shares.budgets(incoming, None)).losses(pages - room)


def _paths(nodes: Sequence[Node]) -> dict[int, Node]:
    """The nodes and all above them, by serial: what locks on them would hold."""
    found: dict[int, Node] = {}
    for node in nodes:
        step: Node | None = node
        while step is not None and step.serial not in found:
            found[step.serial] = step
            step = step.parent
    return found


@dataclass(slots=True)
class _Walk:
    """The order of victims as `evict` would find it, with what has left so far."""

    tree: TreePages
    kept: set[int]
    budgets: dict[Share, int]
    _left: set[int] = field(default_factory=set)
    _children_left: Counter[int] = field(default_factory=Counter)
    # Used since they were pushed, or bare since their children left: (present value, serial, node).
    _late: list[tuple[float, int, Node]] = field(default_factory=list)

    def losses(self, wanted: int) -> Forecast:
        found: list[Loss] = []
        order = self.tree.victim_order()
        entry = next(order, None)
        while wanted > 0:
            if self._late and (entry is None or self._late[0][:2] < entry[:2]):
                node = heapq.heappop(self._late)[2]
                if node.serial not in self._left and self._may_leave(node):
                    found.append(self._take(node, wanted))
                    wanted -= found[-1].pages
                continue
            if entry is None:
                return Forecast(wanted, [])  # floors keep the rest
            self._surface(entry)
            entry = next(order, None)
        return Forecast(0, found)

    def _may_leave(self, node: Node) -> bool:
        """Whether its share may give it; one that keeps a node keeps those behind it as well."""
        room = self.budgets[node.share]
        if room > 0 and (not self.tree.leaves_whole(node) or len(node.pages) <= room):
            return True
        self.budgets[node.share] = 0
        return False

    def _surface(self, entry: Entry) -> None:
        node = entry[3]
        if self._is_victim(node):
            self._enter(node)

    def _enter(self, node: Node) -> None:
        heapq.heappush(self._late, (self.tree.policy.value(node), node.serial, node))

    def _is_victim(self, node: Node) -> bool:
        children = node.device_children - self._children_left[node.serial]
        return (
            node.lock == 0
            and not children
            and bool(node.pages)
            and node.serial not in self.kept
            and node.serial not in self._left
        )

    def _take(self, node: Node, wanted: int) -> Loss:
        count = self.tree.leaving(node, wanted, self.budgets[node.share])
        self.budgets[node.share] -= count
        if count == len(node.pages):
            self._left.add(node.serial)
            if node.parent is not None:
                self._children_left[node.parent.serial] += 1
                if self._is_victim(node.parent):
                    self._enter(node.parent)
        return Loss(node, count)
