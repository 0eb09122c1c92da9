"""The persistent order of eviction candidates, with lazy invalidation."""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections import deque
from collections.abc import Iterator

from sglang_graft.cache.node import Entry, Node
from sglang_graft.cache.policy import EvictionPolicy

# Below this many dead entries a rebuild costs more than they do.
_DEAD_KEPT = 64
# The sorted front is filled by this many entries at a time, and cut to half when it has grown past.
_REFILL = 32
_FRONT_MOST = 512


class VictimHeap:
    """Evictable leaves by (policy value, serial), smallest first.

    A node has at most one live entry (`node.entry`). Every evictable leaf has one; a node that
    was locked, got children or was used since its push keeps its entry untouched, so that match,
    insert and lock do no heap work. `pop` settles such entries when they surface: nodes that are
    no victims lose their entry (the tree pushes them again when they become one), used nodes go
    back with their present value. Each push pays for one settlement, so a victim costs
    O(log n) at most.

    Three places keep the order. The front is a short sorted list of the smallest entries: all that
    is taken or looked at comes from it. Of the others, those that come in rising order go to the
    lane, a queue: under LRU that is nearly all of them, so a victim costs O(1) whatever the size of
    the tree. The rest goes to the heap. The front is filled from the smaller of their heads.

    An entry is dead when its node went away or was pushed anew. Dead entries are swept once they
    outnumber the live ones, so the places never exceed twice the nodes plus a constant.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._front: list[Entry] = []
        self._heap: list[Entry] = []
        self._lane: deque[Entry] = deque()
        self._pushes = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._front) + len(self._heap) + len(self._lane)

    def push(self, node: Node) -> None:
        """Enter a node that became an evictable leaf; a node that has an entry keeps it."""
        if node.entry is not None:
            return
        entry = self._entry(node)
        if self._front and entry < self._front[-1]:
            insort(self._front, entry)
            if len(self._front) > _FRONT_MOST:
                self._shorten()
        elif not self._lane or self._lane[-1] < entry:
            self._lane.append(entry)
        else:
            heapq.heappush(self._heap, entry)

    def pop(self) -> Node | None:
        """Remove and return the least valuable evictable leaf; None = there is none."""
        head = self.head()
        return None if head is None else self.take(head)

    def take(self, head: Entry) -> Node:
        """Remove the leaf whose entry `head()` has just returned."""
        assert self._front[0] is head, f"node {head[1]} is not the next victim"
        del self._front[0]
        head[3].entry = None
        return head[3]

    def head(self) -> Entry | None:
        """The entry of the leaf that `pop` would return, which stays."""
        while self._front or self._fill(_REFILL):
            entry = self._front[0]
            node = entry[3]
            live = node.entry is entry
            if live and node.is_victim() and self._policy.value(node) <= entry[0]:
                return entry
            del self._front[0]
            if not live:
                self._dead -= 1
                continue
            node.entry = None
            if node.is_victim():
                self.push(node)
        return None

    def coldest(self, limit: int) -> Iterator[Node]:
        """The victims that `pop` would yield next, in order, without taking them.

        Looks at the `limit` smallest entries; used or dead ones among them are left out. O(1) each,
        but for entries that come to the front for the first time. Lazy: victims must stay as they
        are meanwhile.
        """
        self._fill(limit)
        value = self._policy.value
        for entry in itertools.islice(self._front, limit):
            node = entry[3]
            # The first two say what `is_victim` would, at less than half its price.
            if node.lock or node.device_children or node.entry is not entry:
                continue
            if node.pages and value(node) <= entry[0]:
                yield node

    def any_uncopied(self, limit: int) -> bool:
        """Whether `coldest` may yield a node without a host copy; False is certain."""
        self._fill(limit)
        uncopied = [entry for entry in self._front[:limit] if entry[3].host is None]
        return any(entry[3].entry is entry and entry[3].is_victim() for entry in uncopied)

    def order(self) -> Iterator[Entry]:
        """Live entries in rising order, by the values that they were pushed with.

        Lazy: each one costs O(log of those before it). The heap must stay as it is meanwhile.
        """
        behind = heapq.merge(self._lane, self._heap_order())
        for entry in itertools.chain(self._front, behind):
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

    def _fill(self, count: int) -> bool:
        """Bring the front to `count` entries if there are as many; whether it has any."""
        front, heap, lane = self._front, self._heap, self._lane
        while len(front) < count:
            if lane and not (heap and heap[0] < lane[0]):
                front.append(lane.popleft())
            elif heap:
                front.append(heapq.heappop(heap))
            else:
                break
        return bool(front)

    def _shorten(self) -> None:
        """Send the later half of the front back to the heap."""
        for entry in self._front[_FRONT_MOST // 2 :]:
            heapq.heappush(self._heap, entry)
        del self._front[_FRONT_MOST // 2 :]

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
        nodes = self.nodes()
        self._dead = 0
        self._lane = deque(sorted(self._entry(node) for node in nodes))
        self._front, self._heap = [], []

    def clear(self) -> None:
        """Drop every entry, live or dead."""
        for entry in self._all():
            entry[3].entry = None
        self._front.clear()
        self._heap.clear()
        self._lane.clear()
        self._dead = 0

    def check_invariants(self) -> None:
        """Order in each place, one live entry a node, the count of dead ones, no value above its
        node's."""
        front, heap, lane = self._front, self._heap, list(self._lane)
        for place in range(1, len(heap)):
            assert heap[(place - 1) // 2] < heap[place], f"victim heap out of order at {place}"
        for name, row in (("front", front), ("lane", lane)):
            for place in range(1, len(row)):
                assert row[place - 1] < row[place], f"victim {name} out of order at {place}"
        for behind in (heap[:1], lane[:1]):
            assert not front or not behind or front[-1] < behind[0], "the front is not the smallest"
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

    def _all(self) -> Iterator[Entry]:
        return itertools.chain(self._front, self._heap, self._lane)

    def _live(self) -> list[Entry]:
        return [entry for entry in self._all() if entry[3].entry is entry]

    def _entry(self, node: Node) -> Entry:
        self._pushes += 1
        entry = (self._policy.value(node), node.serial, self._pushes, node)
        node.entry = entry
        return entry

    def _sweep(self) -> None:
        self._front = [entry for entry in self._front if entry[3].entry is entry]
        self._heap = [entry for entry in self._heap if entry[3].entry is entry]
        heapq.heapify(self._heap)
        self._lane = deque(entry for entry in self._lane if entry[3].entry is entry)
        self._dead = 0
