"""Which nodes are copied to the host before they have to leave the device.

Eviction never waits, so what it takes is lost unless a copy was made earlier. Copies are made in
the order in which eviction would take their nodes, each after those above it on its path:

- of the next `ahead` pages of that order always, displacing host copies that are worth less;
- of everything else as long as the host pool has free pages.

At most `under_way` pages are on their way at a time, or as many as came in since the pass before,
if those are more: passes are as far apart as forwards take, and one that computes long prompts
fills more pages than any fixed number that suits a step of decoding.

A server whose host pool is large copies all committed KV once. One whose host pool is full, or
smaller than the device, copies only what is about to leave, and does not fill the host with what
the device keeps anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sglang_graft.cache import Node, State, UnifiedTree
from sglang_graft.tiers.copies import Way
from sglang_graft.tiers.counters import Counters
from sglang_graft.tiers.transfers import Transfers

# Victims looked at in one pass; the order of eviction also holds entries that are out of date.
LOOKED_AT = 128


@dataclass(slots=True)
class WriteBack:
    """Starts write-backs, at most `under_way` pages at a time or what came in since the last pass
    (a single larger node excepted)."""

    tree: UnifiedTree
    transfers: Transfers
    counters: Counters
    ahead: int
    under_way: int
    _inserted: int = 0
    """`tree.inserted_pages` at the last pass."""

    def run(self, spare: Collection[int] = ()) -> None:
        """One scheduling pass. Copies of nodes whose serials are in `spare` make no room."""
        host = self.tree.host
        assert host is not None, "write-back needs a host tier"
        busy, seen = self.transfers.pages_under_way(Way.STORE), 0
        most = max(self.under_way, self.tree.inserted_pages - self._inserted)
        self._inserted = self.tree.inserted_pages
        # Most passes end here: all that is about to leave was copied before.
        if busy >= most or not self.tree.any_uncopied(LOOKED_AT):
            return
        for victim in self.tree.coldest(LOOKED_AT):
            seen += len(victim.pages)
            if victim.host is not None:
                continue  # so has all that is above it
            for node in _uncopied(self.tree, victim):
                if self.transfers.has(node):
                    break  # a request kept it when its adapter's copies were given up; later
                room = host.ledger.free >= len(node.pages)
                if busy and busy + len(node.pages) > most:
                    return
                if not room and seen > self.ahead:
                    return
                if host.add(node, len(node.pages), spare=spare) is None:
                    return
                self.transfers.store(node)
                busy += len(node.pages)
                self.counters.add(
                    node.adapter.identity, write_backs=1, pages_to_host=len(node.pages)
                )


def _uncopied(tree: UnifiedTree, victim: Node) -> Iterator[Node]:
    """The nodes of a path that have no host copy, top-down. A dropped adapter's stay without."""
    adapter = victim.adapter
    if adapter.dropped:
        return
    if victim is adapter:
        if adapter.host is None and adapter.state is State.RESIDENT:
            yield adapter
        return
    path: list[Node] = []
    step: Node | None = victim
    while step is not None and step is not adapter and step.host is None:
        path.append(step)
        step = step.parent
    yield from reversed(path)
