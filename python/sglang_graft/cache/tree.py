"""The unified tree: adapters on the first level, their prefix KV below, one eviction order."""

from __future__ import annotations

from array import array

from sglang_graft.cache import invariants
from sglang_graft.cache.node import AdapterNode, Insertion, Match, Node, State
from sglang_graft.cache.policy import EvictionPolicy
from sglang_graft.cache.runs import (
    TOKEN_BYTES,
    below,
    covering,
    detach,
    salted,
    shared_bytes,
    split,
    token_bytes,
)
from sglang_graft.cache.victims import VictimHeap
from sglang_graft.pool.ledger import Owner, PageLedger


class UnifiedTree:
    """Indexes the pages of one ledger: adapter weights and cached KV.

    The tree owns the ledger's ADAPTER, IN_FLIGHT and KV_CACHED pages. KV pages come in by `insert`
    as KV_RUNNING. KV is only ever below an adapter that has its pages, because eviction takes
    leaves and an adapter is a leaf only without KV: invalid KV is 0 by construction.

    Deterministic: a logical clock, creation order and the policy decide, nothing else. Not
    thread-safe: one scheduler loop owns it.
    """

    def __init__(self, ledger: PageLedger, *, page_tokens: int, policy: EvictionPolicy) -> None:
        if page_tokens < 1:
            raise ValueError(f"page_tokens: wanted 1 or more, got {page_tokens}")
        self.ledger = ledger
        self.page_tokens = page_tokens
        self.policy = policy
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._victims = VictimHeap(policy)
        self._clock = 0
        self._serials = 0
        self._evictable = 0
        self._protected = 0
        self._adapters: dict[str | None, AdapterNode] = {}
        self._leaving: dict[int, AdapterNode] = {}  # dropped, still locked; by serial
        self._base = AdapterNode(self._next_serial(), None, 0)
        self._base.state = State.RESIDENT
        self._adapters[None] = self._base

    # ---- adapters

    @property
    def base(self) -> AdapterNode:
        """The base model: no weight pages, always resident, never evicted or dropped."""
        return self._base

    def adapter(self, identity: str | None) -> AdapterNode | None:
        """The node of a known identity (None is the base model), None if there is none."""
        return self._adapters.get(identity)

    def adapters(self) -> list[AdapterNode]:
        """Every known adapter node in creation order, the base model first."""
        return list(self._adapters.values())

    def add_adapter(self, identity: str, weight_pages: int) -> AdapterNode:
        """Make an identity known, without loading it. A known one is returned as it is.

        ValueError: its weights can never fit, or were announced with another size before.
        """
        if not 0 <= weight_pages <= self.ledger.total:
            raise ValueError(
                f"adapter {identity!r}: wanted weights of at most {self.ledger.total} pages "
                f"(the whole pool), got {weight_pages}; raise --mem-fraction-static"
            )
        node = self._adapters.get(identity)
        if node is None:
            node = AdapterNode(self._next_serial(), identity, weight_pages)
            self._adapters[identity] = node
        elif node.weight_pages != weight_pages:
            raise ValueError(
                f"adapter {identity!r}: wanted the {node.weight_pages} pages that it was added "
                f"with, got {weight_pages}; an identity is a hash of the weights"
            )
        return node

    def load(self, adapter: AdapterNode, *, use_reserve: bool = True) -> list[int] | None:
        """Take pages for the weights of an absent adapter: state LOADING, owner IN_FLIGHT.

        Evicts what is missing; with `use_reserve=False` the ledger's reserve stays free. Returns []
        if the adapter is not absent, and None, with nothing changed, if there is no room now. The
        caller copies into the pages and then calls `loaded`; if `adapter.pages` is no longer this
        list by then, the node was evicted meanwhile and the copy is void.
        """
        if adapter.dropped:
            raise ValueError(f"adapter {adapter.identity!r} was dropped: add it again to load it")
        if adapter.state is not State.ABSENT:
            return []
        # An absent adapter has nothing below it and no pages: no victim can be its own.
        assert not adapter.children, f"adapter {adapter.identity!r} is absent but has KV"
        room = self.ledger.free - (0 if use_reserve else self.ledger.reserve)
        if adapter.weight_pages > room + self._evictable:
            return None
        self.evict(adapter.weight_pages - room)
        pages = self.ledger.take(adapter.weight_pages, Owner.IN_FLIGHT, use_reserve=use_reserve)
        assert pages is not None, f"{adapter.weight_pages} pages were free, and could not be taken"
        adapter.state = State.LOADING
        adapter.loads += 1
        adapter.pages = pages
        adapter.last_use = self._tick()
        self.policy.loaded(adapter, self._clock)
        self._count_new(adapter, len(pages))
        return pages

    def loaded(self, adapter: AdapterNode) -> None:
        """The copy of a LOADING adapter has landed."""
        assert adapter.state is State.LOADING, f"{adapter.identity!r} is {adapter.state.value}"
        self.ledger.move(adapter.pages, Owner.IN_FLIGHT, Owner.ADAPTER)
        adapter.state = State.RESIDENT

    def drop(self, adapter: AdapterNode) -> int:
        """Forget an adapter: what nobody holds is freed at once, the rest with its last lock.

        From now on it matches nothing, and `add_adapter` of the same identity makes a new node.
        Returns the pages freed at once. ValueError for the base model.
        """
        if adapter is self._base:
            raise ValueError("the base model cannot be dropped: wanted an adapter node")
        if adapter.dropped:
            return 0
        adapter.dropped = True
        del self._adapters[adapter.identity]
        self._leaving[adapter.serial] = adapter
        return self._release(adapter)

    # ---- prefixes

    def match(self, adapter: AdapterNode, tokens: array[int], *, salt: str = "") -> Match:
        """The longest cached prefix of `tokens` (typecode "q") in whole pages.

        `salt` names a separate space of prefixes below the adapter. Refreshes last_use and hits on
        the path; splits a node if the match ends inside it, so that `Match.node` ends there too.
        """
        pages: list[int] = []
        adapter.hits += 1
        if adapter.dropped:
            return Match(pages, adapter)
        node, _ = self._descend(adapter, token_bytes(tokens), salt, 1, pages)
        return Match(pages, node)

    def insert(
        self,
        adapter: AdapterNode,
        tokens: array[int],
        pages: list[int],
        *,
        start: int,
        salt: str = "",
    ) -> Insertion:
        """Hand the KV of a run to the tree.

        tokens: the whole run in whole pages.   pages: KV_RUNNING pages of tokens[start:]; the
        caller holds a lock on the path of tokens[:start]. Pages of tokens that are cached already
        go back to the ledger, the others become KV_CACHED. Refreshes last_use on the path. The new
        node is unlocked. A dropped adapter takes the run too: its running requests end in order.
        """
        data = token_bytes(tokens)
        size, first = len(data), start * TOKEN_BYTES
        assert size == first + len(pages) * self._page_bytes, (
            f"{len(tokens)} tokens are not {start} cached ones and {len(pages)} pages"
        )
        assert size % self._page_bytes == 0, f"{len(tokens)} tokens are not whole pages"
        assert adapter.state is not State.ABSENT, f"KV for absent adapter {adapter.identity!r}"
        held: list[int] = []
        node, found = self._descend(adapter, data, salt, 0, held)
        cached = found // TOKEN_BYTES
        assert cached >= start, f"the caller locked {start} tokens, but {cached} are cached"
        assert start == 0 or covering(node, found, first).lock, f"nobody locks {start} tokens"
        duplicates = (cached - start) // self.page_tokens
        if duplicates:
            self.ledger.give(pages[:duplicates], Owner.KV_RUNNING)
        if found < size:
            fresh = pages[duplicates:]
            self.ledger.move(fresh, Owner.KV_RUNNING, Owner.KV_CACHED)
            node = self._append(node, data[found:], fresh, salt)
            held += fresh
        return Insertion(node, cached, duplicates, held)

    def lock(self, node: Node) -> None:
        """Hold a node, its path and its adapter until `unlock` of the same node."""
        assert node.parent is not None or node is node.adapter, f"node {node.serial} was evicted"
        step: Node | None = node
        moved = 0
        while step is not None:
            if step.lock == 0:
                moved += len(step.pages)
            step.lock += 1
            step = step.parent
        self._evictable -= moved
        self._protected += moved

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. The last unlock of a dropped adapter frees what it still has."""
        step: Node | None = node
        moved = 0
        while step is not None:
            assert step.lock > 0, f"node {step.serial} is unlocked more often than locked"
            step.lock -= 1
            if step.lock == 0:
                moved += len(step.pages)
                if step.is_victim():
                    self._victims.push(step)
            step = step.parent
        self._evictable += moved
        self._protected -= moved
        adapter = node.adapter
        if adapter.dropped and adapter.lock == 0:
            self._release(adapter)

    def use(self, node: Node) -> None:
        """Tell the policy that a request was admitted with this match; once for each request.

        Matches and locks come several times for a request that waits, so they do not count. Call
        it before the request's own KV is inserted.
        """
        again = node.whole and not node.children and node.parent is not None
        step: Node | None = node
        while step is not None:
            self.policy.used(step, self._clock, again=again)
            step = step.parent

    # ---- eviction

    def evict(self, pages: int) -> int:
        """Free at least `pages` pages, or all that nobody holds; returns how many.

        Takes the least valuable leaf first: a KV leaf, or an adapter with nothing below it. Of a
        KV leaf larger than what is missing only the end goes; weights go whole. O(log n) a victim.
        """
        freed = 0
        run: list[int] = []
        if pages > 0 and self.policy.changed():
            self.reprice()
        while freed < pages:
            victim = self._victims.pop()
            if victim is None:
                break
            self.policy.evicted(victim, self._clock)
            if isinstance(victim, AdapterNode):
                victim.evictions += 1
                freed += self._unload(victim)
            else:
                gone = self._cut(victim, pages - freed)
                freed += len(gone)
                run += gone
        self.ledger.give(run, Owner.KV_CACHED)
        self._evictable -= freed
        return freed

    def revalue(self, node: Node) -> None:
        """Look at one node again whose value fell."""
        self._victims.reshaped(node)

    def reprice(self) -> None:
        """Order the victims anew after the policy changed its prices. O(n)."""
        self._victims.reprice()

    def reset(self) -> None:
        """Free everything. Adapters stay known, but absent. Nothing may be locked.

        Call it before `PageLedger.reset`: the tree gives its pages back to the ledger itself.
        """
        assert self._protected == 0, f"reset while requests hold {self._protected} pages"
        held = [a.identity for a in (*self._adapters.values(), *self._leaving.values()) if a.lock]
        assert not held, f"reset while requests hold {held}"
        self._victims.clear()
        for adapter in self._adapters.values():
            self._free_below(adapter)
            self._evictable -= self._unload(adapter)

    # ---- what is held

    @property
    def evictable(self) -> int:
        """Pages of weights and KV that no request holds."""
        return self._evictable

    @property
    def protected(self) -> int:
        """Pages of weights and KV that a request holds."""
        return self._protected

    def invalid_kv_pages(self) -> int:
        """Pages of cached KV whose adapter is absent, read from the nodes' own state."""
        adapters = (*self._adapters.values(), *self._leaving.values())
        return sum(adapter.kv_pages for adapter in adapters if adapter.state is State.ABSENT)

    def check_invariants(self) -> None:
        """Compare every counter, owner, link and heap entry with a full walk. O(pages)."""
        invariants.check(self)

    # ---- internals

    def _descend(
        self, adapter: AdapterNode, data: bytes, salt: str, hits: int, pages: list[int]
    ) -> tuple[Node, int]:
        """Walk down the longest cached prefix, refreshing nodes and collecting their pages.

        Returns its last node and its length in bytes.
        """
        clock = self._tick()
        page_bytes = self._page_bytes
        end = len(data) - len(data) % page_bytes
        edge = salted(data[:page_bytes], salt)
        node: Node = adapter
        node.last_use = clock
        offset = 0
        while offset < end:
            child = node.children.get(edge)
            if child is None:
                break
            if data.startswith(child.key, offset):
                offset += len(child.key)
            else:
                size = shared_bytes(child.key, data, offset, end, page_bytes)
                lower, child = child, split(child, self._next_serial(), size, page_bytes)
                self._victims.reshaped(lower)
                offset += size
            child.last_use = clock
            child.hits += hits
            pages += child.pages
            node = child
            edge = data[offset : offset + page_bytes]
        return node, offset

    def _append(self, parent: Node, key: bytes, pages: list[int], salt: str) -> Node:
        """A new leaf, just used."""
        edge = key[: self._page_bytes]
        if salt and parent is parent.adapter:
            edge = salted(edge, salt)
        node = Node(self._next_serial(), key, pages, edge)
        node.parent = parent
        node.adapter = parent.adapter
        node.last_use = self._clock
        node.start = parent.start + len(parent.pages) if parent is not parent.adapter else 0
        self.policy.used(node, self._clock, again=False)
        parent.children[edge] = node
        node.adapter.kv_pages += len(pages)
        self._count_new(node, len(pages))
        return node

    def _count_new(self, node: Node, pages: int) -> None:
        if node.lock:
            self._protected += pages
        else:
            self._evictable += pages
            if node.is_victim():
                self._victims.push(node)

    def _cut(self, leaf: Node, wanted: int) -> list[int]:
        """Take up to `wanted` pages off the end of a popped leaf; the caller frees and counts."""
        keep = max(0, len(leaf.pages) - wanted)
        gone = leaf.pages[keep:]
        leaf.adapter.kv_pages -= len(gone)
        if keep:
            leaf.pages = leaf.pages[:keep]
            leaf.whole = False
            leaf.key = leaf.key[: keep * self._page_bytes]
            self._victims.push(leaf)
        else:
            parent = detach(leaf)
            if parent.is_victim():
                self._victims.push(parent)
        return gone

    def _unload(self, adapter: AdapterNode) -> int:
        """Free the weights, landed or not; the caller counts them. The base model has none."""
        if adapter is self._base:
            return 0
        pages = adapter.pages
        if pages:
            landed = adapter.state is State.RESIDENT
            self.ledger.give(pages, Owner.ADAPTER if landed else Owner.IN_FLIGHT)
        adapter.pages = []
        adapter.state = State.ABSENT
        return len(pages)

    def _free_below(self, adapter: AdapterNode) -> int:
        """Free the KV of an adapter that nobody holds; returns its pages."""
        run: list[int] = []
        for node in below(adapter):
            if node.lock == 0:
                run += node.pages
                self._victims.forget(node)
                detach(node)
        self.ledger.give(run, Owner.KV_CACHED)
        adapter.kv_pages -= len(run)
        self._evictable -= len(run)
        return len(run)

    def _release(self, adapter: AdapterNode) -> int:
        """Free what nobody holds of a dropped adapter, and the adapter too if it is free."""
        freed = self._free_below(adapter)
        if adapter.lock == 0:
            self._victims.forget(adapter)
            weights = self._unload(adapter)
            self._evictable -= weights
            freed += weights
            del self._leaving[adapter.serial]
        return freed

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _next_serial(self) -> int:
        self._serials += 1
        return self._serials
