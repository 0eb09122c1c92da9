"""The unified tree: adapters on the first level, their prefix KV below, one eviction order."""

from __future__ import annotations

from array import array

from sglang_graft.cache import invariants
from sglang_graft.cache.departures import Reason
from sglang_graft.cache.node import AdapterNode, Insertion, Match, Node, State
from sglang_graft.cache.pages import TreePages
from sglang_graft.cache.policy import EvictionPolicy
from sglang_graft.cache.runs import (
    TOKEN_BYTES,
    below,
    covering,
    detach,
    salted,
    shared_bytes,
    token_bytes,
)
from sglang_graft.cache.shares import Share
from sglang_graft.pool.ledger import IN_FLIGHT, KV_CACHED, Owner, PageLedger


class UnifiedTree(TreePages):
    """Indexes the pages of one ledger: adapter weights and cached KV.

    The tree owns the ledger's ADAPTER, IN_FLIGHT and KV_CACHED pages. KV pages come in by `insert`
    as KV_RUNNING. KV on the device is only ever below an adapter that has its pages, because
    eviction takes what has nothing below it there: invalid KV is 0 by construction.

    `host` is the ledger of host pages; None means that nothing is kept off the device.

    Deterministic: a logical clock, creation order and the policy decide, nothing else. Not
    thread-safe: one scheduler loop owns it.
    """

    def __init__(
        self,
        ledger: PageLedger,
        *,
        page_tokens: int,
        policy: EvictionPolicy,
        host: PageLedger | None = None,
    ) -> None:
        super().__init__(ledger, page_tokens=page_tokens, policy=policy, host=host)
        self._adapters: dict[str | None, AdapterNode] = {}
        self._leaving: dict[int, AdapterNode] = {}  # dropped, still locked; by serial
        self._base = AdapterNode(self._next_serial(), None, 0)
        self._base.state = State.RESIDENT
        self._base.share = self.shares.common
        self._adapters[None] = self._base
        self.inserted_pages = 0
        """Pages of KV that came in by `insert` and had no host copy yet, ever."""

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
            node.share = self.shares.common
            self._adapters[identity] = node
        elif node.weight_pages != weight_pages:
            raise ValueError(
                f"adapter {identity!r}: wanted the {node.weight_pages} pages that it was added "
                f"with, got {weight_pages}; an identity is a hash of the weights"
            )
        return node

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
        if self.host is not None:
            self.host.release(adapter)
        return self._release(adapter)

    def prioritize(self, adapter: AdapterNode, priority: int) -> None:
        """Let the adapter and its KV stay longer than others, or less long. O(n) on a change.

        Values may fall by it, so the whole order is taken anew.
        """
        if priority != adapter.priority:
            adapter.priority = priority
            self.reprice()

    def trim(self, adapter: AdapterNode) -> int:
        """Free what nobody holds of an adapter: its KV, and its weights when no lock is left.

        A known adapter stays known and can be loaded again. Returns the pages freed.
        """
        freed = self._free_below(adapter, Reason.UNLOAD)
        if adapter.lock == 0:
            self._victims.forget(adapter)
            weights = self._unload(adapter)
            self._note(Reason.UNLOAD, adapter, weights)
            self._evictable -= weights
            freed += weights
        return freed

    # ---- prefixes

    def match(self, adapter: AdapterNode, tokens: array[int], *, salt: str = "") -> Match:
        """The longest prefix of `tokens` (typecode "q") on the device, in whole pages.

        `salt` names a separate space of prefixes below the adapter. Refreshes last_use and hits on
        the path, also where it goes on off the device (`peek` shows that part); splits a node if
        the match ends inside it, so that `Match.node` ends there too.
        """
        pages: list[int] = []
        adapter.hits += 1
        if adapter.dropped:
            return Match(pages, adapter)
        node, _ = self._descend(adapter, token_bytes(tokens), salt, 1, pages, [])
        return Match(pages, node)

    def peek(self, adapter: AdapterNode, tokens: array[int], *, salt: str = "") -> list[Node]:
        """The nodes of the cached prefix, wherever their KV is, top-down; changes nothing.

        The last one may go on beyond what `tokens` share with it.
        """
        data = token_bytes(tokens)
        page_bytes = self._page_bytes
        end = len(data) - len(data) % page_bytes
        found: list[Node] = []
        node: Node | None = None if adapter.dropped else adapter
        offset = 0
        edge = salted(data[:page_bytes], salt)
        while node is not None and offset < end:
            node = node.children.get(edge)
            if node is None:
                break
            found.append(node)
            if not data.startswith(node.key, offset):
                break
            offset += len(node.key)
            edge = data[offset : offset + page_bytes]
        return found

    def expect(self, adapter: AdapterNode, tokens: array[int], *, salt: str = "") -> None:
        """A request for this prefix has come and waits.

        The adapter and what is cached of the prefix, wherever it is, are as young as any from now
        on. They could leave while it waits, otherwise, as they were used long ago.
        """
        path = self.peek(adapter, tokens, salt=salt)
        if adapter.dropped or (adapter is self._base and not path):
            return  # the base model itself never leaves
        for node in (adapter, *path):
            node.last_use = self._clock
            self.policy.expected(node, self._clock)
            if self.host is not None and node.host is not None:
                self.host.settle(node)

    def insert(
        self,
        adapter: AdapterNode,
        tokens: array[int],
        pages: list[int],
        *,
        start: int,
        salt: str = "",
        share: Share | None = None,
    ) -> Insertion:
        """Hand the KV of a run to the tree, as pages of `share` (the common one by default).

        tokens: the whole run in whole pages.   pages: KV_RUNNING pages of tokens[start:]; the
        caller holds a lock on the path of tokens[:start]. Pages of tokens that are cached already
        go back to the ledger, the others become KV_CACHED; nodes of the run that were on the host
        alone take them as theirs. Refreshes last_use on the path. The new node is unlocked. A
        dropped adapter takes the run too: its running requests end in order.
        """
        data = token_bytes(tokens)
        size, first = len(data), start * TOKEN_BYTES
        assert size == first + len(pages) * self._page_bytes, (
            f"{len(tokens)} tokens are not {start} cached ones and {len(pages)} pages"
        )
        assert size % self._page_bytes == 0, f"{len(tokens)} tokens are not whole pages"
        assert adapter.state is not State.ABSENT, f"KV for absent adapter {adapter.identity!r}"
        held: list[int] = []
        beyond: list[Node] = []
        node, found = self._descend(adapter, data, salt, 0, held, beyond)
        cached = found // TOKEN_BYTES
        assert cached >= start, f"the caller locked {start} tokens, but {cached} are cached"
        assert start == 0 or covering(node, found, first).lock, f"nobody locks {start} tokens"
        duplicates = (cached - start) // self.page_tokens
        self.ledger.give(pages[:duplicates], Owner.KV_RUNNING)
        fresh = pages[duplicates:]
        self.ledger.move(fresh, Owner.KV_RUNNING, KV_CACHED)
        held += fresh
        for node in beyond:
            count = len(node.key) // self._page_bytes
            self._adopt(node, fresh[:count])
            fresh = fresh[count:]
            found += len(node.key)
        if fresh:
            node = self._append(node, data[found:], fresh, salt, share or self.shares.common)
            self.inserted_pages += len(fresh)
        return Insertion(node, cached, duplicates, held)

    # ---- all of it

    def reset(self) -> None:
        """Free everything. Adapters stay known, but absent. Nothing may be locked.

        Call it before `PageLedger.reset`: the tree gives its pages back to the ledger itself.
        """
        assert self._protected == 0, f"reset while requests hold {self._protected} pages"
        held = [a.identity for a in (*self._adapters.values(), *self._leaving.values()) if a.lock]
        assert not held, f"reset while requests hold {held}"
        self._victims.clear()
        for adapter in self._adapters.values():
            self._free_below(adapter, Reason.FLUSH)
            weights = self._unload(adapter)
            self._note(Reason.FLUSH, adapter, weights)
            self._evictable -= weights

    def invalid_kv_pages(self) -> int:
        """Pages of cached KV whose adapter is absent, read from the nodes' own state."""
        adapters = (*self._adapters.values(), *self._leaving.values())
        return sum(adapter.kv_pages for adapter in adapters if adapter.state is State.ABSENT)

    def check_invariants(self) -> None:
        """Compare every counter, owner, link and heap entry with a full walk. O(pages)."""
        invariants.check(self)

    # ---- internals

    def _descend(
        self,
        adapter: AdapterNode,
        data: bytes,
        salt: str,
        hits: int,
        pages: list[int],
        beyond: list[Node],
    ) -> tuple[Node, int]:
        """Walk down the longest cached prefix, refreshing its nodes.

        Returns the last node whose KV is on the device and its end in bytes. Collects the pages of
        these, and the nodes that follow without KV on the device.
        """
        clock, host = self._tick(), self.host
        all_landed = not self.ledger.count(IN_FLIGHT)
        page_bytes = self._page_bytes
        end = len(data) - len(data) % page_bytes
        edge = salted(data[:page_bytes], salt)
        node: Node = adapter
        last: Node = adapter
        node.last_use = clock
        offset = cached = 0
        while offset < end:
            child = node.children.get(edge)
            if child is None:
                break
            if data.startswith(child.key, offset):
                offset += len(child.key)
            else:
                size = shared_bytes(child.key, data, offset, end, page_bytes)
                child = self._split(child, size)
                offset += size
            child.last_use = clock
            child.hits += hits
            if not beyond and child.pages and (all_landed or self.is_landed(child)):
                pages += child.pages
                last, cached = child, offset
            else:
                beyond.append(child)
            if host is not None and child.host is not None:
                host.settle(child)
            node = child
            edge = data[offset : offset + page_bytes]
        return last, cached

    def _adopt(self, node: Node, pages: list[int]) -> None:
        """KV that was on the host alone, or on its way here, was computed anew into `pages`."""
        if node.pages:
            owner = self._owner(node)
            void, node.pages = node.pages, pages
            self._free(void, owner, node.last_forward)
            node.last_forward = self.ledger.forwards
        else:
            self._place(node, pages, self.ledger.forwards)

    def _append(self, parent: Node, key: bytes, pages: list[int], salt: str, share: Share) -> Node:
        """A new leaf, just used."""
        edge = key[: self._page_bytes]
        if salt and parent is parent.adapter:
            edge = salted(edge, salt)
        node = Node(self._next_serial(), key, [], edge)
        node.parent = parent
        node.adapter = parent.adapter
        node.share = share
        node.last_use = self._clock
        node.start = parent.start + len(parent.key) // self._page_bytes
        self.policy.used(node, self._clock, again=False)
        parent.children[edge] = node
        self._place(node, pages, self.ledger.forwards)
        return node

    def _free_below(self, adapter: AdapterNode, reason: Reason) -> int:
        """Free the KV of an adapter that nobody holds; returns its device pages."""
        freed = 0
        for node in below(adapter):
            if self.host is not None:
                self.host.release(node)
            if node.lock == 0:
                freed += len(node.pages)
                self._change(node, -len(node.pages))
                self._victims.forget(node)
                if node.pages:
                    self._free(node.pages, self._owner(node), node.last_forward)
                detach(node)
        self.departures.note(
            self._clock, reason, adapter.identity, freed, weights=False, kept=False
        )
        adapter.kv_pages -= freed
        self._evictable -= freed
        return freed

    def _release(self, adapter: AdapterNode) -> int:
        """Free what nobody holds of a dropped adapter; forget it when that is all."""
        freed = self.trim(adapter)
        if adapter.lock == 0:
            del self._leaving[adapter.serial]
        return freed
