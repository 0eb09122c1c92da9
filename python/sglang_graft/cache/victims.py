"""The persistent order of eviction candidates, with lazy invalidation."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator

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
    back with their present value. Each push pays for one settlement, so a victim costs
    O(log n) at most.

    Two places keep the order. Entries that come in rising order go to the lane, a queue: under LRU
    that is nearly all of them, so a victim costs O(1) whatever the size of the tree. The others go
    to the heap. The smaller of both heads is next.

    An entry is dead when its node went away or was pushed anew. Dead entries are swept once they
    outnumber the live ones, so both places never exceed twice the nodes plus a constant.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[Entry] = []
        self._lane: deque[Entry] = deque()
        self._pushes = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap) + len(self._lane)

    def push(self, node: Node) -> None:
        """Enter a node that became an evictable leaf; a node that has an entry keeps it."""
        if node.entry is not None:
            return
        entry = self._entry(node)
        if not self._lane or self._lane[-1] < entry:
            self._lane.append(entry)
        else:
            heapq.heappush(self._heap, entry)

    def pop(self) -> Node | None:
        """Remove and return the least valuable evictable leaf; None = there is none."""
        head = self.head()
        if head is None:
            return None
        self._take()
        node = head[3]
        node.entry = None
        return node

    def head(self) -> Entry | None:
        """The entry of the leaf that `pop` would return, which stays."""
        while (entry := self._first()) is not None:
            node = entry[3]
            live = node.entry is entry
            if live and node.is_victim() and self._policy.value(node) <= entry[0]:
                return entry
            self._take()
            if not live:
                self._dead -= 1
                continue
            node.entry = None
            if node.is_victim():
                self.push(node)
        return None

    def coldest(self, limit: int) -> list[Node]:
        """The victims that `pop` would yield next, in order, without taking them.

        Looks at the `limit` smallest entries; used or dead ones among them are left out. O(limit
        log limit).
        """
        order = heapq.merge(self._lane, self._heap_order())
        return [
            entry[3]
            for entry in itertools.islice(order, limit)
            if entry[3].entry is entry
            and entry[3].is_victim()
            and self._policy.value(entry[3]) <= entry[0]
        ]

    def order(self) -> Iterator[Entry]:
        """Live entries in rising order, by the values that they were pushed with.

        Lazy: each one costs O(log of those before it). The heap must stay as it is meanwhile.
        """
        for entry in heapq.merge(self._lane, self._heap_order()):
            if entry[3].entry is entry:
                yield entry

    def _heap_order(self) -> Iterator[Entry]:
        """Entries of the heap in rising order; the heap stays as it is."""
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, place = heapq.heappop(frontier)
            yield entry
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child], child))

    def _first(self) -> Entry | None:
        """The smallest entry, live or dead."""
        heap, lane = self._heap, self._lane
        if lane and not (heap and heap[0] < lane[0]):
            return lane[0]
        return heap[0] if heap else None

    def _take(self) -> None:
        """Remove the smallest entry."""
        heap, lane = self._heap, self._lane
        if lane and not (heap and heap[0] < lane[0]):
            lane.popleft()
        else:
            heapq.heappop(heap)

    def forget(self, node: Node) -> None:
        """The node leaves the tree by another way than `pop`."""
        if node.entry is not None:
            node.entry = None
            self._dead += 1
            if self._dead > _DEAD_KEPT and 2 * self._dead > len(self):
                self._sweep()

    def reshaped(self, node: Node) -> None:
        """The node lost a part: a value that fell needs a new entry, a risen one is found late."""
        if node.entry is not None and self._policy.value(node) < node.entry[0]:
            self.forget(node)
            self.push(node)

    def reprice(self) -> None:
        """Take every value anew. O(n)."""
        nodes = [entry[3] for entry in self._live()]
        self._dead = 0
        self._lane = deque(sorted(self._entry(node) for node in nodes))
        self._heap = []

    def clear(self) -> None:
        """Drop every entry, live or dead."""
        for entry in (*self._heap, *self._lane):
            entry[3].entry = None
        self._heap.clear()
        self._lane.clear()
        self._dead = 0

    def check_invariants(self) -> None:
        """Heap order, one live entry a node, the count of dead ones, no value above its node's."""
        heap, lane = self._heap, list(self._lane)
        for place in range(1, len(heap)):
            assert heap[(place - 1) // 2] < heap[place], f"victim heap out of order at {place}"
        for place in range(1, len(lane)):
            assert lane[place - 1] < lane[place], f"victim lane out of order at {place}"
        live = self._live()
        dead = len(self) - len(live)
        assert dead == self._dead, f"victims: {dead} dead entries, the counter says {self._dead}"
        assert dead <= _DEAD_KEPT or 2 * dead <= len(self), f"{dead} dead of {len(self)} entries"
        for value, serial, _, node in live:
            now = self._policy.value(node)
            assert value <= now, f"node {serial}: value fell from {value} to {now} unseen"

    def live_serials(self) -> set[int]:
        """Serials of the nodes with a live entry. O(n), for checks."""
        return {entry[1] for entry in self._live()}

    def nodes(self) -> list[Node]:
        """The nodes with a live entry. O(n), for checks."""
        return [entry[3] for entry in self._live()]

    def _live(self) -> list[Entry]:
        return [entry for entry in (*self._heap, *self._lane) if entry[3].entry is entry]

    def _entry(self, node: Node) -> Entry:
        self._pushes += 1
        entry = (self._policy.value(node), node.serial, self._pushes, node)
        node.entry = entry
        return entry

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if entry[3].entry is entry]
        heapq.heapify(self._heap)
        self._lane = deque(entry for entry in self._lane if entry[3].entry is entry)
        self._dead = 0
