"""Loads for requests that wait: the adapter first, then its KV from the host, top-down.

A request whose bytes are about to land starts, and its forward waits for them on the device. Any
other is passed over, so that later ones run meanwhile. How long that may go on is bounded: after
`patience` passes in which a later request was let through, the request takes whatever nobody holds
and nobody before it wants, and as soon as its adapter's image is in host memory, nobody behind it
starts before it does. What runs then ends, copies land, KV is brought for it in a bounded number of
passes, and an adapter that was registered fits into an empty pool. A read from disk blocks nobody.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from sglang_graft.cache import AdapterNode, Node, State, UnifiedTree
from sglang_graft.cache.runs import TOKEN_BYTES
from sglang_graft.tiers.counters import Counters
from sglang_graft.tiers.images import Images
from sglang_graft.tiers.rates import Rates
from sglang_graft.tiers.transfers import Transfers
from sglang_graft.tiers.wish import Need, Wish

PATIENCE = 4
LOOKAHEAD = 16
PROMOTIONS = 8
"""Passes in which KV is promoted for one request, as it may leave again before the request starts;
after that the request starts with what is there."""
REFUSALS = 2
"""Passes in which KV may find no room; while the pool stays full after that, one of all requests
that wait tries again in each pass."""
FOLLOW_SECONDS = 8e-3
"""A forward waits for bytes that land sooner than this. A pass comes about one step of decoding (6
to 20 ms) before its batch can run, so most of the copy is over by then; being passed over costs a
request a step or two."""
THRASH_WINDOW = 64
"""Ticks of the tree's clock within which a load after an eviction counts as thrash."""


@dataclass(slots=True)
class _Waiting:
    """What is remembered of a wish from pass to pass."""

    node: AdapterNode
    failures_seen: int
    warm: bool
    need: Need = Need.ROOM
    overtaken: int = 0
    promotions: int = 0
    refused: int = 0
    counted_in: int = -1
    waits_since: float | None = None


@dataclass(slots=True)
class Prefetch:
    """Call `consider` once a pass with the queue in order, then `may_start` for each request.

    `paths` finds name and folder of an adapter node, for images that have to be read again.
    """

    tree: UnifiedTree
    transfers: Transfers
    images: Images
    counters: Counters
    rates: Rates
    page_bytes: int
    paths: Callable[[AdapterNode], tuple[str, Path]]
    lookahead: int = LOOKAHEAD
    patience: int = PATIENCE
    follow_seconds: float = FOLLOW_SECONDS
    host_kv: bool = True
    now: Callable[[], float] = time.monotonic
    """Seconds, for the counters; no decision looks at them."""
    _states: dict[str, _Waiting] = field(default_factory=dict)
    _wishes: list[Wish] = field(default_factory=list)
    _ahead: set[str] = field(default_factory=set)
    _passed_over: list[str] = field(default_factory=list)
    _pass: int = 0
    _full: bool = False
    """Whether KV found no room in this pass."""
    _no_room_for: float = math.inf
    """The fewest pages of an adapter that found no room beside what all wishes want, in this pass.
    As many find none either: until the next pass, room only becomes less."""
    _blocker: str | None = None

    def consider(self, wishes: Sequence[Wish]) -> None:
        """A new pass: start loads for the first `lookahead` wishes, in the order of the queue."""
        self._pass += 1
        self._passed_over = []
        self._full = False
        self._no_room_for = math.inf
        self._blocker = None
        self._wishes = list(wishes[: self.lookahead])
        self._ahead = {wish.key for wish in self._wishes}
        before, self._states = self._states, {w.key: self._state(w) for w in wishes}
        for key, state in before.items():
            if key not in self._states:
                self._stop_waiting(state)
        for wish in self._wishes:
            self._states[wish.key].need = self._advance(wish)

    def is_new(self, wish: Wish) -> bool:
        """Whether no pass has seen it yet."""
        return wish.key not in self._states

    def spared(self) -> set[int]:
        """Serials of adapters whose images waiting requests want: they stay in the host pool."""
        return {wish.node.serial for wish in self._wishes}

    def may_start(self, wish: Wish) -> bool:
        """Whether the request can be admitted now; call it in the order of the queue."""
        state = self._states.get(wish.key)
        if state is None:
            state = self._states[wish.key] = self._state(wish)
        if wish.key not in self._ahead:
            state.need = self._look(wish)
        elif state.need in (Need.NOTHING, Need.COPY) and wish.node.state is State.ABSENT:
            state.need = Need.ROOM  # it has left since this pass began
        blocked = self._blocker not in (None, wish.key)
        if state.need is Need.COPY and not blocked and self._follow(wish):
            state.need = Need.NOTHING
        if state.need is Need.NOTHING and not blocked:
            self._stop_waiting(state)
            self._overtake()
            return True
        self._pass_over(wish, state)
        return False

    def failure(self, wish: Wish) -> str | None:
        """Why this wish can never start: its image could not be read since it began to wait."""
        state = self._states.get(wish.key)
        found = self.images.failure(wish.node)
        if state is None or found is None or found.number <= state.failures_seen:
            return None
        return found.message

    def came_warm(self, key: str) -> bool:
        """Whether the adapter of this wish was on the device when the wish was first seen."""
        state = self._states.get(key)
        return state is not None and state.warm

    def overtaken(self, key: str) -> int:
        """In how many passes a later request was let through before this one."""
        state = self._states.get(key)
        return 0 if state is None else state.overtaken

    def wanted(self) -> list[Node]:
        """What waiting requests have on the device already: no load for anybody else takes it."""
        return self._wanted(self._wishes)

    # ---- what a wish waits for

    def _advance(self, wish: Wish) -> Need:
        """Take the next step for a wish, and say what it waits for then."""
        if self.failure(wish) is not None:
            return Need.FAILED
        node = wish.node
        if node.state is State.ABSENT:
            need = self._bring_adapter(wish)
            if need is not Need.COPY:
                return need
        waits = self._bring_kv(wish)
        if node.state is State.LOADING or waits:
            return Need.COPY
        return Need.NOTHING

    def _look(self, wish: Wish) -> Need:
        """What a wish further back waits for; its loads have to wait too."""
        if wish.node.state is not State.RESIDENT:
            if self.failure(wish) is not None:
                return Need.FAILED
            host = self.tree.host
            assert host is not None, "prefetch needs a host tier"
            return Need.ROOM if wish.node.pages or host.is_readable(wish.node) else Need.DISK
        path = self.tree.peek(wish.node, wish.tokens, salt=wish.salt)
        on_its_way = any(node.pages and not self.tree.is_landed(node) for node in path)
        return Need.COPY if on_its_way else Need.NOTHING

    def _follow(self, wish: Wish) -> bool:
        """Let the next forward wait for what this wish still waits for, if that is short."""
        path = self.tree.peek(wish.node, wish.tokens, salt=wish.salt)
        coming: list[Node] = [wish.node] if wish.node.state is State.LOADING else []
        coming += [node for node in path if node.pages and not self.tree.is_landed(node)]
        pages = self.transfers.pages_until_landed(coming)
        if pages is None or self.rates.load_seconds(pages * self.page_bytes) > self.follow_seconds:
            return False
        self.transfers.follow(coming)
        return True

    def _bring_adapter(self, wish: Wish) -> Need:
        node, host = wish.node, self.tree.host
        assert host is not None, "prefetch needs a host tier"
        if node.dropped:
            return Need.FAILED
        if node.host is None:
            self.images.want(node, *self.paths(node))
            return Need.DISK
        if not host.is_readable(node):
            return Need.DISK
        share, overdue = wish.share, self._is_overdue(wish)
        if not overdue and share is None and node.weight_pages >= self._no_room_for:
            return Need.ROOM
        # One that is overdue spares only those before it: two of them that do not fit into the pool
        # together would take it from each other for ever.
        with self._wanted_held(self._before(wish) if overdue else self._wishes):
            pages = self.tree.load(node, use_reserve=False, share=share)
        if pages is None:
            if not overdue and share is None:
                self._no_room_for = min(self._no_room_for, node.weight_pages)
            capped = share is not None and share.over_cap(node.weight_pages) > 0
            return Need.CAP if capped else Need.ROOM
        self.transfers.load(node)
        thrash, pages_to_device = self._is_thrash(node), len(node.pages)
        self._add(node, loads=1, pages_to_device=pages_to_device, thrash=thrash)
        return Need.COPY

    def _bring_kv(self, wish: Wish) -> bool:
        """Promote what is worth it; whether KV of this wish is on its way."""
        begun, depth = False, 0
        path = self.tree.peek(wish.node, wish.tokens, salt=wish.salt)
        for place, node in enumerate(path):
            if not node.pages:
                if self.host_kv and self._may_promote(self._states[wish.key]):
                    begun |= self._promote_worthy(wish, path[place:], depth)
                break
            begun |= not self.tree.is_landed(node)
            depth += len(node.key) // TOKEN_BYTES
        return begun

    def _may_promote(self, state: _Waiting) -> bool:
        """A request that waits for room shall not have used up its passes when there is some."""
        if state.promotions >= PROMOTIONS:
            return False
        return state.refused < REFUSALS or not self._full

    def _promote_worthy(self, wish: Wish, path: Sequence[Node], depth: int) -> bool:
        """Promote from the top of `path`, which starts `depth` tokens down, what is cheaper to copy
        than to compute and finds room; whether any of it is on its way.

        What later requests want makes room only when nothing else does: they are admitted later,
        and a prompt that is computed instead would take their pages all the same.
        """
        done: list[Node] = []
        full = False
        for others in (self._wishes, self._before(wish)):
            # Held once for all: what is promoted meanwhile is on this path, which `promote` holds.
            with self._wanted_held(others):
                full = self._promote_run(path, depth, done)
            if not full:
                break
        state, refused = self._states[wish.key], full and not done
        state.refused += refused
        state.promotions += not refused
        self._full |= full
        if done:
            pages, thrash = sum(len(node.pages) for node in done), sum(map(self._is_thrash, done))
            self._add(wish.node, promotions=len(done), pages_to_device=pages, thrash=thrash)
        return any(not self.tree.is_landed(node) for node in done)

    def _promote_run(self, path: Sequence[Node], depth: int, done: list[Node]) -> bool:
        """Go on behind what is `done` of the path; whether it ended for want of room."""
        depth += sum(len(node.key) for node in done) // TOKEN_BYTES
        for node in path[len(done) :]:
            tokens = len(node.key) // TOKEN_BYTES
            if not self._is_worth(node, tokens, depth):
                return False
            if not self._promote(node):
                return True
            done.append(node)
            depth += tokens
        return False

    def _is_worth(self, node: Node, tokens: int, depth: int) -> bool:
        host = self.tree.host
        if host is None or not host.is_readable(node):
            return False
        nbytes = tokens // self.tree.page_tokens * self.page_bytes
        return self.rates.load_seconds(nbytes) < self.rates.prefill_seconds(tokens, depth)

    def _promote(self, node: Node) -> bool:
        if self.tree.promote(node, use_reserve=False) is None:
            return False
        self.transfers.load(node)
        return True

    @contextmanager
    def _wanted_held(self, others: Iterable[Wish]) -> Iterator[None]:
        """What is taken meanwhile is nothing that any of these wants."""
        held = self._wanted(others)
        for node in held:
            self.tree.lock(node)
        try:
            yield
        finally:
            for node in held:
                self.tree.unlock(node)

    def _before(self, wish: Wish) -> list[Wish]:
        """The wishes that are ahead of this one."""
        return list(takewhile(lambda other: other is not wish, self._wishes))

    def _wanted(self, wishes: Iterable[Wish]) -> list[Node]:
        """The last device node of each of these wishes."""
        found: list[Node] = []
        for wish in wishes:
            if wish.node.dropped or wish.node.state is State.ABSENT:
                continue
            last: Node = wish.node
            for node in self.tree.peek(wish.node, wish.tokens, salt=wish.salt):
                if node.pages:
                    last = node
            found.append(last)
        return found

    # ---- waiting

    def _is_overdue(self, wish: Wish) -> bool:
        return self._states[wish.key].overtaken >= self.patience

    def _overtake(self) -> None:
        """A request goes ahead of all that this pass has passed over."""
        for key in self._passed_over:
            state = self._states[key]
            if state.counted_in != self._pass:
                state.counted_in = self._pass
                state.overtaken += 1

    def _pass_over(self, wish: Wish, state: _Waiting) -> None:
        self._passed_over.append(wish.key)
        self._add(wish.node, passes_waited=1)
        if state.waits_since is None:
            state.waits_since = self.now()
        waits_here = state.need in (Need.ROOM, Need.COPY)
        if self._blocker is None and self._is_overdue(wish) and waits_here:
            self._blocker = wish.key

    def _stop_waiting(self, state: _Waiting) -> None:
        """It may start, or has gone."""
        if state.waits_since is not None:
            waited = max(0.0, self.now() - state.waits_since)
            self._add(state.node, seconds_waited=waited)
            state.waits_since = None

    def _state(self, wish: Wish) -> _Waiting:
        known = self._states.get(wish.key)
        if known is not None:
            return known
        self._count_hit(wish)
        warm = wish.node.state is State.RESIDENT
        return _Waiting(wish.node, failures_seen=self.images.failed, warm=warm)

    # ---- counting

    def _count_hit(self, wish: Wish) -> None:
        node = wish.node
        if node.state is not State.ABSENT:
            where = "hits_device"
        else:
            where = "hits_host" if node.host is not None else "hits_disk"
        device = known = 0
        for found in self.tree.peek(node, wish.tokens, salt=wish.salt):
            known += len(found.key) // TOKEN_BYTES
            if found.pages:
                device = known  # what the device has stands above all else
        known = min(known, len(wish.tokens))
        device = min(device, known)
        self._add(
            node,
            **{where: 1},
            tokens_device=device,
            tokens_host=known - device,
            tokens_computed=len(wish.tokens) - known,
        )

    def _is_thrash(self, node: Node) -> bool:
        """Whether a node that has just come back had left shortly before."""
        return node.left > 0 and self.tree.clock - node.left <= THRASH_WINDOW

    def _add(self, adapter: AdapterNode, **amounts: float) -> None:
        if adapter.dropped:
            self.counters.add_total(**amounts)
        else:
            self.counters.add(adapter.identity, **amounts)
