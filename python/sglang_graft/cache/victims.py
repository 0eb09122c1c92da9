"""The persistent heap of eviction candidates, with lazy invalidation."""

from __future__ import annotations

import heapq

from sglang_graft.cache.node import Entry, Node
from sglang_graft.cache.policy import EvictionPolicy

# Below this many dead entries a rebuild costs more than they do.
_DEAD_KEPT = 64


class VictimHeap:
    """Evictable leaves by (policy value, serial), smallest first.

    A node has at most one live entry (`node.entry`). Every evictable leaf has one; a node that
    was locked, got children or was used since its push keeps its entry untouched, so that match,
    insert and lock do no heap work. `pop` settles such entries when they surface: nodes that are
    no victims lose their entry (the tree pushes them again when they become one), used nodes go
    back with their present value. Each push pays for one settlement, so a victim costs O(log n).

    An entry is dead when its node went away or was pushed anew. Dead entries are swept once they
    outnumber the live ones, so the heap never exceeds twice the nodes plus a constant.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[Entry] = []
        self._pushes = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Node) -> None:
        """Enter a node that became an evictable leaf; a node that has an entry keeps it."""
        if node.entry is None:
            heapq.heappush(self._heap, self._entry(node))

    def pop(self) -> Node | None:
        """Remove and return the least valuable evictable leaf; None = there is none."""
        heap = self._heap
        while heap:
            entry = heap[0]
            node = entry[3]
            if node.entry is not entry:
                heapq.heappop(heap)
                self._dead -= 1
            elif not node.is_victim():
                heapq.heappop(heap)
                node.entry = None
            elif self._policy.value(node) > entry[0]:
                heapq.heapreplace(heap, self._entry(node))
            else:
                heapq.heappop(heap)
                node.entry = None
                return node
        return None

    def forget(self, node: Node) -> None:
        """The node leaves the tree by another way than `pop`."""
        if node.entry is not None:
            node.entry = None
            self._dead += 1
            if self._dead > _DEAD_KEPT and 2 * self._dead > len(self._heap):
                self._sweep()

    def reshaped(self, node: Node) -> None:
        """The node lost a part: a value that fell needs a new entry, a risen one is found late."""
        if node.entry is not None and self._policy.value(node) < node.entry[0]:
            self.forget(node)
            self.push(node)

    def reprice(self) -> None:
        """Take every value anew. O(n)."""
        self._sweep()
        self._heap = [self._entry(entry[3]) for entry in self._heap]
        heapq.heapify(self._heap)

    def clear(self) -> None:
        """Drop every entry, live or dead."""
        for entry in self._heap:
            entry[3].entry = None
        self._heap.clear()
        self._dead = 0

    def check_invariants(self) -> None:
        """Heap order, one live entry a node, the count of dead ones, no value above its node's."""
        heap = self._heap
        for place in range(1, len(heap)):
            assert heap[(place - 1) // 2] < heap[place], f"victim heap out of order at {place}"
        live = [entry for entry in heap if entry[3].entry is entry]
        dead = len(heap) - len(live)
        assert dead == self._dead, f"victim heap: {dead} dead entries, counter says {self._dead}"
        assert dead <= _DEAD_KEPT or 2 * dead <= len(heap), f"{dead} dead of {len(heap)} entries"
        for value, serial, _, node in live:
            now = self._policy.value(node)
            assert value <= now, f"node {serial}: value fell from {value} to {now} unseen"

    def live_serials(self) -> set[int]:
        """Serials of the nodes with a live entry. O(n), for checks."""
        return {entry[1] for entry in self._heap if entry[3].entry is entry}

    def _entry(self, node: Node) -> Entry:
        self._pushes += 1
        entry = (self._policy.value(node), node.serial, self._pushes, node)
        node.entry = entry
        return entry

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if entry[3].entry is entry]
        heapq.heapify(self._heap)
        self._dead = 0
