"""The host side of the tree: which nodes have a copy in host memory, and which copy leaves first.

A host page belongs to an adapter's image (ADAPTER), to a node's KV (KV_CACHED), or is being
written (IN_FLIGHT: a copy from the device or a read from disk is under way). Host eviction has no
duty to succeed: what finds no room is not copied.

What leaves, in this order, when a node of policy value v wants room:

1. copies of KV that is also on the device and worth more than v, the latest used first: such KV is
   the furthest from leaving the device, so its copy is needed last and can be made again;
2. copies that are the only ones and worth less than v, the least valuable leaf first.

So copies of what will leave the device soon are kept. An adapter's image may take any room (a
request asks for it), in the same order and at last from images of adapters that are on the device:
those come back from disk at worst.

Copies are made from the top of a path and leave from its end: a KV node that has one has a parent
that has one. So KV that leaves the device with its copy is never cut off from what it continues.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection

from sglang_graft.cache.node import AdapterNode, Entry, HostCopy, Node
from sglang_graft.cache.policy import EvictionPolicy
from sglang_graft.cache.runs import detach
from sglang_graft.pool.ledger import IN_FLIGHT, KV_CACHED, Owner, PageLedger

_DEAD_KEPT = 64
# How many copies of KV that is on both sides are looked at, the latest used first, for one room.
# Those further on leave the device so soon that their copies would only be made again.
_LOOKED_AT = 8
_NOBODY: frozenset[int] = frozenset()


class HostTier:
    """Host pages of one tree: copies, the order in which they leave, and pages that are in use.

    A page that a transfer reads or writes cannot be given to anybody else. When its node goes away
    meanwhile the page stays IN_FLIGHT as an orphan and becomes free when the transfer ends.
    """

    def __init__(self, ledger: PageLedger, policy: EvictionPolicy) -> None:
        self.ledger = ledger
        self.dropped_pages = 0
        """Pages of KV that were lost because their only copy had to leave."""
        self._policy = policy
        self._heap: list[Entry] = []
        self._pushes = 0
        self._dead = 0
        self._kv_twice: dict[int, Node] = {}  # by serial; the latest used last
        self._images_twice: dict[int, Node] = {}
        self._readers: dict[int, int] = {}
        self._orphans: set[int] = set()

    # ---- room and copies

    def add(
        self, node: Node, pages: int, *, force: bool = False, spare: Collection[int] = _NOBODY
    ) -> list[int] | None:
        """Take `pages` host pages for a copy of `node`, which has none: owner IN_FLIGHT.

        Evicts what is worth less (with `force` whatever can go); nodes whose serials are in `spare`
        stay. None, with nothing changed: no room now.
        """
        assert node.host is None, f"node {node.serial} has a host copy already"
        parent = node.parent
        assert parent is None or parent is node.adapter or parent.host, (
            f"node {node.serial} is copied before its parent"
        )
        if pages > self.ledger.total:
            return None
        missing = pages - self.ledger.free
        if missing > 0 and not self._make_room(node, missing, force, spare):
            return None
        taken = self.ledger.take(pages, IN_FLIGHT)
        assert taken is not None, f"{pages} host pages were free, and could not be taken"
        node.host = HostCopy(taken)
        self._count(node, len(taken))
        self.settle(node)
        return taken

    def landed(self, pages: list[int], owner: Owner) -> None:
        """The bytes of IN_FLIGHT pages are there. Orphans among them become free."""
        gone = self._orphans.intersection(pages)
        if gone:
            self._orphans -= gone
            self.ledger.give([page for page in pages if page in gone], IN_FLIGHT)
            pages = [page for page in pages if page not in gone]
        self.ledger.move(pages, IN_FLIGHT, owner)

    def begin_read(self, pages: list[int]) -> None:
        """A transfer reads these pages until `end_read`."""
        for page in pages:
            assert not self.ledger.holds(page, IN_FLIGHT), f"host page {page} has no bytes"
            self._readers[page] = self._readers.get(page, 0) + 1

    def end_read(self, pages: list[int]) -> None:
        """Undo one `begin_read`."""
        gone = []
        for page in pages:
            self._readers[page] -= 1
            if self._readers[page] == 0:
                del self._readers[page]
                if page in self._orphans:
                    self._orphans.remove(page)
                    gone.append(page)
        self.ledger.give(gone, IN_FLIGHT)

    def is_readable(self, node: Node) -> bool:
        """Whether the node has a copy whose bytes have landed."""
        copy = node.host
        if copy is None:
            return False
        if not self.ledger.count(IN_FLIGHT):
            return True
        return not any(self.ledger.holds(page, IN_FLIGHT) for page in copy.pages)

    def release(self, node: Node) -> int:
        """The node loses its copy; returns its pages, which are free unless a transfer has them."""
        copy = node.host
        if copy is None:
            return 0
        self._forget(copy)
        self._kv_twice.pop(node.serial, None)
        self._images_twice.pop(node.serial, None)
        node.host = None
        self._count(node, -len(copy.pages))
        if self._is_quiet():
            self.ledger.give(copy.pages, Owner.ADAPTER if node is node.adapter else KV_CACHED)
            return len(copy.pages)
        for page in copy.pages:
            owner = self.ledger.owner_of(page)
            if owner is IN_FLIGHT:
                self._orphans.add(page)
            elif page in self._readers:
                self._orphans.add(page)
                self.ledger.move([page], owner, IN_FLIGHT)
            else:
                self.ledger.give([page], owner)
        return len(copy.pages)

    # ---- what the tree tells

    def settle(self, node: Node) -> None:
        """The place of a node with a copy changed: it came to or left the device, or was used."""
        twice = self._images_twice if node is node.adapter else self._kv_twice
        twice.pop(node.serial, None)
        if node.pages:
            twice[node.serial] = node
        elif node.is_host_victim():
            self._push(node)

    def reshaped(self, node: Node) -> None:
        """The node lost a part: a value that fell needs a new entry, a risen one is found late."""
        copy = node.host
        if copy is None or copy.entry is None:
            return
        if self._policy.host_value(node) < copy.entry[0]:
            self._forget(copy)
            if node.is_host_victim():
                self._push(node)

    def reprice(self) -> None:
        """Take every value anew. O(n)."""
        nodes = [entry[3] for entry in self._live()]
        self._heap, self._dead = [], 0
        for node in nodes:
            assert node.host is not None, f"node {node.serial} is ordered without a copy"
            node.host.entry = None
            self._push(node)

    # ---- eviction

    def _make_room(self, node: Node, missing: int, force: bool, spare: Collection[int]) -> bool:
        """Free `missing` pages, or nothing at all: what is dropped for nothing is copied again."""
        worth = -math.inf if force else self._policy.host_value(node)
        # The copy above on the path has nothing below it yet, and must not make room for it.
        kept = {*spare, node.serial, node.parent.serial if node.parent else node.serial}
        twice = self._choose_twice(self._kv_twice, missing, worth, kept)
        missing -= sum(map(_pages_of, twice))
        only, passed = self._choose_only(missing, math.inf if force else worth, kept)
        missing -= sum(map(_pages_of, only))
        last: list[Node] = []
        if force:
            last = self._choose_twice(self._images_twice, missing, worth, kept, most=None)
            missing -= sum(map(_pages_of, last))
            above = self._choose_above({node.serial for node in (*twice, *only)}, missing, kept)
            missing -= sum(map(_pages_of, above))
            last += above
        if missing <= 0:
            for victim in twice:
                self.release(victim)
            for victim in only:
                self._drop(victim)
            for victim in last:
                self.release(victim)
        for other in passed:
            if other.is_host_victim():
                self._push(other)
        return missing <= 0

    def _choose_twice(
        self,
        twice: dict[int, Node],
        wanted: int,
        worth: float,
        kept: Collection[int],
        *,
        most: int | None = _LOOKED_AT,
    ) -> list[Node]:
        """Copies to drop of what is on the device too, the latest used first of at most `most`."""
        freed, chosen = 0, []
        for node in itertools.islice(reversed(twice.values()), most):
            if freed >= wanted:
                break
            if (
                self._policy.host_value(node) > worth
                and node.serial not in kept
                and self._is_end(node)
            ):
                chosen.append(node)
                freed += _pages_of(node)
        return chosen

    def _choose_above(self, gone: set[int], wanted: int, kept: Collection[int]) -> list[Node]:
        """More copies of KV that is on the device too, for who takes whatever can go.

        All are looked at, and those above copies in `gone` may go after them: else nothing might
        ever find room in a host that is full of one long path.
        """
        freed, chosen = 0, []
        for start in reversed(self._kv_twice.values()):
            node: Node | None = start
            while (
                freed < wanted
                and node is not None
                and node.serial in self._kv_twice
                and node.serial not in kept
                and node.serial not in gone
                and self._is_end(node, gone)
            ):
                chosen.append(node)
                gone.add(node.serial)
                freed += _pages_of(node)
                node = node.parent
            if freed >= wanted:
                break
        return chosen

    def _is_end(self, node: Node, gone: Collection[int] = _NOBODY) -> bool:
        """Whether its copy is in nobody's use and no child's copy continues it, but for `gone`."""
        if not self._is_idle(node):
            return False
        if node is not node.adapter:
            for child in node.children.values():
                if child.host is not None and child.serial not in gone:
                    return False
        return True

    def _choose_only(
        self, wanted: int, worth: float, kept: Collection[int]
    ) -> tuple[list[Node], list[Node]]:
        """Only copies to drop, the least valuable leaf first, each after what is below it.

        Also returns every node that was taken out of the order on the way.
        """
        freed, chosen, taken = 0, [], []
        ready: list[tuple[float, int, Node]] = []
        left: dict[int, int] = {}  # children of a parent that would remain
        ahead: Node | None = None  # the last one taken out of the order; all in it come later
        while freed < wanted:
            if ahead is None and (ahead := self._pop()) is not None:
                taken.append(ahead)
                heapq.heappush(ready, (self._policy.host_value(ahead), ahead.serial, ahead))
            if not ready or ready[0][0] >= worth:
                break
            node = heapq.heappop(ready)[2]
            if node is ahead:
                ahead = None
            if not self._is_idle(node) or node.serial in kept:
                continue
            chosen.append(node)
            freed += _pages_of(node)
            parent = node.parent
            if parent is None or parent.host is None or parent.pages:
                continue
            left[parent.serial] = left.get(parent.serial, len(parent.children)) - 1
            if not left[parent.serial]:
                heapq.heappush(ready, (self._policy.host_value(parent), parent.serial, parent))
        return chosen, taken

    def _drop(self, node: Node) -> int:
        """Forget a leaf that is on the host alone; an adapter stays known, without its image."""
        freed = self.release(node)
        if not isinstance(node, AdapterNode):
            self.dropped_pages += freed
            node.adapter.dropped_pages += freed
            parent = detach(node)
            if parent.is_host_victim():
                self._push(parent)
        return freed

    def _is_idle(self, node: Node) -> bool:
        copy = node.host
        if copy is None:
            return False
        return self._is_quiet() or not any(
            page in self._readers or self.ledger.holds(page, IN_FLIGHT) for page in copy.pages
        )

    def _is_quiet(self) -> bool:
        """Whether no transfer has any host page: the usual case, without a look at each page."""
        return not self._readers and not self.ledger.count(IN_FLIGHT)

    # ---- the order of only copies: as `VictimHeap`, lazily

    def _push(self, node: Node) -> None:
        copy = node.host
        assert copy is not None, f"node {node.serial} has no host copy to order"
        if copy.entry is None:
            self._pushes += 1
            copy.entry = (self._policy.host_value(node), node.serial, self._pushes, node)
            heapq.heappush(self._heap, copy.entry)

    def _pop(self) -> Node | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            node = entry[3]
            if node.host is None or node.host.entry is not entry:
                self._dead -= 1
                continue
            node.host.entry = None
            if not node.is_host_victim():
                continue
            if self._policy.host_value(node) > entry[0]:
                self._push(node)
                continue
            return node
        return None

    def _forget(self, copy: HostCopy) -> None:
        if copy.entry is None:
            return
        copy.entry = None
        self._dead += 1
        if self._dead > _DEAD_KEPT and 2 * self._dead > len(self._heap):
            self._heap = self._live()
            heapq.heapify(self._heap)
            self._dead = 0

    def _live(self) -> list[Entry]:
        return [e for e in self._heap if e[3].host is not None and e[3].host.entry is e]

    def _count(self, node: Node, pages: int) -> None:
        if node is not node.adapter:
            node.adapter.host_kv_pages += pages


def _pages_of(node: Node) -> int:
    """Host pages of a node."""
    return 0 if node.host is None else len(node.host.pages)
