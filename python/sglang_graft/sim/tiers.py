"""The tiers of a replayed pool: the real prefetch and write-back, with copies that land at once.

How long a copy or a read takes is the replay's business; here it only happens, and is counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from sglang_graft.cache import AdapterNode, Node, Rates, State, UnifiedTree
from sglang_graft.pool.ledger import Owner
from sglang_graft.tiers.build import write_back
from sglang_graft.tiers.copies import Way
from sglang_graft.tiers.counters import Counters
from sglang_graft.tiers.idle import IdlePromotion
from sglang_graft.tiers.images import Images
from sglang_graft.tiers.prefetch import LOOKAHEAD, Prefetch
from sglang_graft.tiers.transfers import Transfers
from sglang_graft.tiers.wish import Wish
from sglang_graft.tiers.write_back import WriteBack

# One pass reads the image, one loads the weights, each promotes KV; and one to spare.
_PASSES = 6
# Write-back runs this often while its lead is used up.
_PASSES_AHEAD = 32


@dataclass(slots=True)
class Moved:
    """Pages that moved for one request, or in all."""

    read: int = 0
    weights: int = 0
    kv: int = 0
    stored: int = 0

    def copy(self) -> Moved:
        """As it is at this moment."""
        return Moved(self.read, self.weights, self.kv, self.stored)


class Tiers(Protocol):
    """Brings a request's adapter and KV to the device, and keeps copies of what may leave it."""

    moved: Moved

    def bring(self, key: str, adapter: AdapterNode, tokens: array[int]) -> None:
        """Weights to the device, and what of the KV is elsewhere and worth a copy."""

    def step(self, pages: int) -> None:
        """After `pages` were taken or came free to leave: copies of what will leave soon."""

    def begin_pass(self, queue: Sequence[Wish]) -> None:
        """Before the scheduler admits anybody: such copies, then what the first of the queue need.
        From then on `step` makes none, and `bring` brings nothing."""

    def may_start(self, wish: Wish) -> bool:
        """Whether this one of the queue may be admitted in this pass; ask in its order."""

    def begun(self) -> list[tuple[Node, int, bool]]:
        """What `begin_pass` has begun to move since the last call: pages of a node, and whether
        from the disk."""

    def promote_idle(self, pages: int) -> int:
        """Nobody waits: bring back about `pages` pages that have room; returns how many."""

    def check_invariants(self) -> None:
        """Assert that the host's pages add up."""


@dataclass(slots=True)
class DeviceAlone:
    """No host tier: weights come from the disk each time, KV is computed again."""

    tree: UnifiedTree
    moved: Moved = field(default_factory=Moved)

    def bring(self, key: str, adapter: AdapterNode, tokens: array[int]) -> None:
        """See Tiers."""
        if adapter.state is State.ABSENT:
            pages = self.tree.load(adapter)
            assert pages is not None, f"no room for adapter {adapter.identity} of request {key}"
            self.tree.loaded(adapter)
            self.moved.read += len(pages)
            self.moved.weights += len(pages)

    def step(self, pages: int) -> None:
        """There is nothing to copy to."""

    def begin_pass(self, queue: Sequence[Wish]) -> None:
        """There is nothing to copy to, or from."""

    def may_start(self, wish: Wish) -> bool:
        """Weights are read when it is admitted."""
        return True

    def begun(self) -> list[tuple[Node, int, bool]]:
        """Nothing."""
        return []

    def promote_idle(self, pages: int) -> int:
        """There is nothing to copy from."""
        return 0

    def check_invariants(self) -> None:
        """There are no host pages."""


@dataclass(slots=True)
class _Instant:
    """What prefetch and write-back see as transfers and images; everything is done at once."""

    tree: UnifiedTree
    moved: Moved
    begun: list[tuple[Node, int, bool]] = field(default_factory=list)
    """See `Tiers.begun`."""
    failed: int = 0

    def pages_under_way(self, way: Way) -> int:
        """None, ever."""
        return 0

    def has(self, node: Node) -> bool:
        """Never: a copy is over when the call returns."""
        return False

    def load(self, node: Node) -> None:
        """From the host to the device."""
        self.begun.append((node, len(node.pages), False))
        if isinstance(node, AdapterNode):
            self.moved.weights += len(node.pages)
            self.tree.loaded(node)
        else:
            self.moved.kv += len(node.pages)
            self.tree.landed(node.pages)

    def store(self, node: Node) -> None:
        """From the device to the host."""
        self.moved.stored += len(node.pages)
        self._land(node)

    def want(self, node: AdapterNode, name: str, path: Path) -> None:
        """From the disk to the host."""
        host = self.tree.host
        assert host is not None, "an image needs a host tier"
        pages = host.add(node, node.weight_pages, force=True)
        assert pages is not None, f"the host has no room for the image of {name}"
        self.moved.read += len(pages)
        self.begun.append((node, len(pages), True))
        self._land(node)

    def failure(self, node: AdapterNode) -> None:
        """Reads do not fail here."""

    def _land(self, node: Node) -> None:
        assert self.tree.host is not None, "a copy needs a host tier"
        assert node.host is not None, f"node {node.serial} has no copy"
        owner = Owner.ADAPTER if isinstance(node, AdapterNode) else Owner.KV_CACHED
        self.tree.host.landed(node.host.pages, owner)


class ThreeTiers:
    """Device, host and disk, moved by the server's own `Prefetch` and `WriteBack`."""

    def __init__(
        self,
        tree: UnifiedTree,
        rates: Rates,
        page_bytes: int,
        ahead: int,
        *,
        lookahead: int = LOOKAHEAD,
    ) -> None:
        """`ahead` pages of the order of eviction are copied before they have to leave, unless
        `begin_pass` is called, where the first `lookahead` of the queue are looked at."""
        self.tree = tree
        self.moved = Moved()
        self._instant = _Instant(tree, self.moved)
        transfers, counters = cast("Transfers", self._instant), Counters()
        self._prefetch = Prefetch(
            tree=tree,
            transfers=transfers,
            images=cast("Images", transfers),
            counters=counters,
            rates=rates,
            page_bytes=page_bytes,
            paths=lambda node: (str(node.identity), Path()),
            lookahead=lookahead,
        )
        self._write_back = WriteBack(tree, transfers, counters, ahead, under_way=ahead)
        self._by_pass = write_back(tree, transfers, counters)
        self._passes = False
        self._idle = IdlePromotion(tree, transfers, counters)
        self._ahead, self._due = ahead, 0

    def bring(self, key: str, adapter: AdapterNode, tokens: array[int]) -> None:
        """See Tiers."""
        if self._passes:
            return
        wish = Wish(key, adapter, tokens)
        for _ in range(_PASSES):
            self._prefetch.consider([wish])
            if self._prefetch.may_start(wish):
                self._instant.begun.clear()
                return
        raise AssertionError(f"request {key} does not start after {_PASSES} passes")

    def step(self, pages: int) -> None:
        """See Tiers. A pass copies all that is about to leave, where the host has room for it."""
        if self._passes:
            return
        self._due += pages
        if self._due >= self._ahead // _PASSES_AHEAD:
            self._due = 0
            self._write_back.run()

    def begin_pass(self, queue: Sequence[Wish]) -> None:
        """See Tiers. As far ahead as the server does it, and in its order."""
        self._passes = True
        for wish in queue:
            if self._prefetch.is_new(wish):
                self.tree.expect(wish.node, wish.tokens)
        self._by_pass.run(self._prefetch.spared())
        self._prefetch.consider(queue)

    def may_start(self, wish: Wish) -> bool:
        """See Tiers."""
        return self._prefetch.may_start(wish)

    def begun(self) -> list[tuple[Node, int, bool]]:
        """See Tiers."""
        found, self._instant.begun = self._instant.begun, []
        return found

    def promote_idle(self, pages: int) -> int:
        """See Tiers."""
        before = start = self.moved.weights + self.moved.kv
        while True:
            self._idle.run()
            now = self.moved.weights + self.moved.kv
            if now == before or now - start >= pages:
                return now - start
            before = now

    def check_invariants(self) -> None:
        """See Tiers."""
        assert self.tree.host is not None, "three tiers need a host tier"
        self.tree.host.ledger.check_invariants()
