"""Copies under way between device and host, and what has to come after them.

Fences, so that nobody ever waits on the host side:

- a load starts behind the last forward that may have touched the pages that it fills, which the
  ledger knows: mostly one that is over, so the copy runs beside what runs. A write-back starts
  behind every forward launched so far;
- a loaded page is used after `poll` saw its copy landed, or behind its copy: `follow` puts the next
  forward there;
- a device page that leaves its node while a copy has it is free at once; whoever writes it next
  (the next forward, or a load) is put behind that copy;
- host pages that a copy has are not given away before it has landed (`HostTier`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sglang_graft.cache import AdapterNode, Node, State, UnifiedTree
from sglang_graft.pool import Owner
from sglang_graft.tiers.copies import Copier, Ticket, Way
from sglang_graft.tiers.histogram import SECONDS, Histogram


@dataclass(slots=True, eq=False)
class Copy:
    """One started copy: host page i to or from device page i, for `node`.

    followed: forwards are behind it, so the tree takes its pages for landed.
    """

    way: Way
    node: Node
    host: list[int]
    device: list[int]
    ticket: Ticket
    began: float
    followed: bool = False


def _no_time() -> float:
    return 0.0


def _alone(count: int) -> int:
    """One rank agrees with itself."""
    return count


def _unheard(pages: int, seconds: float) -> None:
    """Nobody measures."""


@dataclass(slots=True)
class Transfers:
    """Starts copies for nodes of `tree`, and tells the tree when they have landed.

    Copies the same way end in the order in which they began. `agree` turns the number of ended
    copies that this rank saw into one that all ranks saw (their minimum), so that all decide alike.
    `now` is a clock in seconds for `load_seconds`, which nothing is decided by.
    """

    tree: UnifiedTree
    copier: Copier
    agree: Callable[[int], int] = _alone
    on_loaded: Callable[[int, float], None] = _unheard
    """Told the pages and the seconds of each load that has landed."""
    pages_moved: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(Way, 0))
    adapter_pages_loaded: int = 0
    now: Callable[[], float] = _no_time
    load_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """From the start of an adapter's copy to the pass that saw it landed."""
    _under_way: dict[Way, deque[Copy]] = field(
        default_factory=lambda: {way: deque() for way in Way}
    )
    _touching: dict[int, Copy] = field(default_factory=dict)
    _fences: dict[int, Copy] = field(default_factory=dict)
    _left: dict[int, Copy] = field(default_factory=dict)
    """Pages that left their node while a copy had them: the last such copy."""

    def __post_init__(self) -> None:
        assert self.tree.host is not None, "transfers need a tree with a host tier"
        self.tree.on_freed = self._freed

    def pages_under_way(self, way: Way) -> int:
        """Pages of copies that have not landed."""
        queue = self._under_way[way]
        return sum([len(copy.device) for copy in queue]) if queue else 0

    @property
    def idle(self) -> bool:
        """Whether no copy is under way."""
        return not any(self._under_way.values())

    def has(self, node: Node) -> bool:
        """Whether a copy to or from the device pages of `node` is under way."""
        return bool(node.pages) and node.pages[0] in self._touching

    def load(self, node: Node) -> None:
        """Start filling the IN_FLIGHT pages of `node` from its host copy."""
        host, copy = self.tree.host, node.host
        assert host is not None, "the tree has no host tier"
        assert copy is not None, f"node {node.serial} has no host copy to load"
        host.begin_read(copy.pages)
        self._start(Way.LOAD, node, list(copy.pages), node.pages)

    def store(self, node: Node) -> None:
        """Start writing the pages of `node` into its IN_FLIGHT host copy."""
        assert node.host is not None, f"node {node.serial} has no host pages to store into"
        self._start(Way.STORE, node, list(node.host.pages), node.pages)

    def poll(self) -> list[Copy]:
        """Take note of landed copies and return them."""
        landed = []
        # Not `for way in Way`: enums of Python 3.11 take long to walk and to hash.
        for queue in self._under_way.values():
            if not queue:
                continue  # for every rank alike
            count = 0
            for copy in queue:
                if not copy.ticket.done():
                    break
                count += 1
            for _ in range(self.agree(count)):
                copy = queue.popleft()
                self._land(copy)
                landed.append(copy)
        return landed

    def pages_until_landed(self, nodes: Iterable[Node]) -> int | None:
        """Pages of all loads that end before those into `nodes` have, these included.

        None: a node waits for pages or for an image, and no load into it has begun.
        """
        loads: set[int] = set()
        for node in nodes:
            copy = self._load_into(node)
            if copy is None:
                return None
            loads.add(id(copy))
        pages = 0
        for copy in self._under_way[Way.LOAD] if loads else ():
            pages += len(copy.device)
            loads.discard(id(copy))
            if not loads:
                break
        return pages

    def follow(self, nodes: Iterable[Node]) -> None:
        """Let the next forward wait on the device for the loads into `nodes`, which then count as
        landed."""
        for node in nodes:
            copy = self._load_into(node)
            assert copy is not None, f"no load into node {node.serial} is under way"
            if not copy.followed:
                copy.followed = True
                self._fences[id(copy)] = copy
                self._tell_tree(copy, self._still_of(copy))

    def before_forward(self) -> None:
        """Call it on the forward's queue before each launch."""
        self.copier.begin_forward([copy.ticket for copy in self._fences.values()])
        self._fences.clear()
        self.tree.ledger.forwards += 1

    def check_invariants(self) -> None:
        """Assert that every page in a copy belongs to it alone, or is fenced."""
        for page, copy in self._touching.items():
            assert copy in self._under_way[copy.way], f"page {page} is in a copy that has landed"
            assert page in copy.device, f"page {page} is not in the copy that it is listed with"
            owner = self.tree.ledger.owner_of(page)
            filled = copy.way is Way.STORE or copy.followed
            wanted = (Owner.KV_CACHED, Owner.ADAPTER) if filled else (Owner.IN_FLIGHT,)
            assert owner in wanted, f"page {page} is in a {copy.way.value}, and {owner.name}"
        flying = self.tree.ledger.count(Owner.IN_FLIGHT)
        loading = sum(
            copy.way is Way.LOAD and not copy.followed for copy in self._touching.values()
        )
        # A pinned adapter may have its pages before its image is in the host pool.
        waiting = sum(
            len(node.pages)
            for node in self.tree.adapters()
            if node.state is State.LOADING and not self.has(node)
        )
        assert flying == loading + waiting, (
            f"{flying} pages are in flight, loads have {loading}, {waiting} wait for an image"
        )
        for page, copy in self._left.items():
            assert copy in self._under_way[copy.way], f"page {page} left a copy that has landed"

    def _start(self, way: Way, node: Node, host: list[int], device: list[int]) -> None:
        assert len(host) == len(device), f"{len(host)} host pages, {len(device)} device pages"
        ledger, left = self.tree.ledger, self._left
        after = {id(left[page]): left[page].ticket for page in device if page in left}
        forwards = ledger.forwards if way is Way.STORE else ledger.last_forward(device)
        pairs = list(zip(host, device, strict=True))
        ticket = self.copier.copy(way, pairs, list(after.values()), forwards)
        copy = Copy(way, node, host, device, ticket, self.now())
        for page in device:
            assert page not in self._touching, f"page {page} is in a copy already"
            self._touching[page] = copy
        self._under_way[way].append(copy)
        self.pages_moved[way] += len(device)

    def _freed(self, pages: Sequence[int]) -> None:
        for page in pages:
            copy = self._touching.pop(page, None)
            if copy is not None:
                self._fences[id(copy)] = copy
                self._left[page] = copy

    def _land(self, copy: Copy) -> None:
        host = self.tree.host
        assert host is not None, "the tree has no host tier"
        self._fences.pop(id(copy), None)
        mine = self._still_of(copy)
        for page in copy.device:
            if self._left.get(page) is copy:
                del self._left[page]
        for page in mine:
            del self._touching[page]
        is_adapter = isinstance(copy.node, AdapterNode)
        if copy.way is Way.STORE:
            host.landed(copy.host, Owner.ADAPTER if is_adapter else Owner.KV_CACHED)
            return
        host.end_read(copy.host)
        self.on_loaded(len(copy.device), copy.ticket.seconds())
        if not copy.followed:
            self._tell_tree(copy, mine)
        if is_adapter and mine:
            self.load_seconds.observe(self.now() - copy.began)

    def _tell_tree(self, copy: Copy, pages: Sequence[int]) -> None:
        """What was loaded into these pages can be used."""
        node = copy.node
        if not isinstance(node, AdapterNode):
            self.tree.landed(pages)
        elif pages:
            assert node.state is State.LOADING, f"{node.identity!r} is {node.state.value}"
            self.tree.loaded(node)
            self.adapter_pages_loaded += len(pages)

    def _still_of(self, copy: Copy) -> list[int]:
        """Device pages of a copy that have not left their node since it began."""
        return [page for page in copy.device if self._touching.get(page) is copy]

    def _load_into(self, node: Node) -> Copy | None:
        """The load under way into the pages of a node that is not there yet."""
        copy = self._touching.get(node.pages[0]) if node.pages else None
        return copy if copy is not None and copy.way is Way.LOAD else None
