"""The tree cache that SGLang sees: its calls translated to the unified tree.

Seam (0.5.17): `register_radix_cache_backend`, chosen by `--radix-cache-backend graft`. Reason: a
request's prefix lies below its adapter, so that SGLang's ordinary lock counting holds the adapter
for exactly as long as the request runs, and evict() weighs both in one order.

The contract that SGLang relies upon: available + evictable + protected + the pages of running
requests beyond their prefix == total, in tokens, whenever it asks.
"""

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, register_radix_cache_backend

from sglang_graft.cache import AdapterNode, Node
from sglang_graft.cache.shares import Incoming, Share
from sglang_graft.engine.allocator import ArenaAllocator, upload
from sglang_graft.engine.flags import BACKEND
from sglang_graft.engine.observe import Observations
from sglang_graft.engine.page_table import PageTable
from sglang_graft.engine.pool import Pool
from sglang_graft.engine.tenancy import Tenancy
from sglang_graft.engine.waiting import WaitingRequests
from sglang_graft.pool import Owner
from sglang_graft.tiers import Residency, Tiers

_NO_IDS = np.empty(0, dtype=np.int64)


def _tokens(ids: Any, length: int) -> "array[int]":
    cut = ids[:length]
    return cut if isinstance(cut, array) else array("q", cut)


class GraftPrefixCache(BasePrefixCache):
    """One scheduler's view of the tree. `keep=False` caches nothing (--disable-radix-cache)."""

    # SGLang skips locks when a cache says that it is disabled; adapters need their locks always.
    disable = False
    # Whether a request of the present scheduling pass found no slot for its adapter.
    waits_for_slot = False

    def __init__(
        self,
        pool: Pool,
        residency: Residency,
        tiers: Tiers,
        params: Any,
        *,
        keep: bool,
        check: bool,
        with_tenants: bool = False,
    ) -> None:
        self.pool = pool
        self.tree = pool.tree
        self.residency = residency
        self.tiers = tiers
        self.keep = keep
        self.check = check
        self.page_table = PageTable()
        self.tenancy = Tenancy(self, enabled=with_tenants)
        # Pages that shares are about to get, while SGLang evicts for a batch.
        self.incoming: Incoming = {}
        self._asking: Share | None = None
        self.waiting = WaitingRequests(self)
        self.observed = Observations()
        # Wall time, for display and histograms only.
        self.tree.departures.now = time.time
        tiers.transfers.now = time.perf_counter
        self.page_size: int = params.page_size
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator: ArenaAllocator = params.token_to_kv_pool_allocator
        self.device = torch.device(self.token_to_kv_pool_allocator.device)
        assert self.page_size == pool.layout.page_tokens, (self.page_size, pool.layout)
        if params.enable_metrics:
            self.init_metrics_collector()

    # ---- prefixes

    @property
    def root_node(self) -> AdapterNode:
        """The base model's node; every other namespace has its own adapter node."""
        return self.tree.base

    def root_node_handle(self, extra_key: str | None = None) -> AdapterNode:
        """The adapter node of SGLang's namespace string, which ends with the adapter's id."""
        for known in (*self.residency.known(), *self.residency.retired()):
            if extra_key is not None and extra_key.endswith(known.adapter_id):
                return known.node
        return self.tree.base

    def is_root(self, node: Node) -> bool:
        """Whether nothing of a prompt is cached at `node`."""
        return node.parent is None

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest cached prefix below the request's adapter; at least the adapter node."""
        assert params.req is not None, "a match without its request cannot know its adapter"
        adapter, salt = self.namespace(params.req)
        pages: list[int] = []
        node: Node = adapter
        if self.keep:
            key = params.key.raw_token_ids()
            tokens = _tokens(key, len(key) // self.page_size * self.page_size)
            pages, node = self.tree.match(adapter, tokens, salt=salt)
            self._checked()
        ids = self.pool.layout.dense_ids(pages) if pages else _NO_IDS
        return MatchResult(
            device_indices=upload(ids, self.device),
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
        )

    def insert(self, params: InsertParams) -> InsertResult:
        """Not offered: requests enter the tree with their page numbers, see `cache_*_req`."""
        raise NotImplementedError("Graft inserts by request; wanted cache_finished_req")

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        """Hand what a prefill (or a chunk of one) computed to the tree; the request keeps a lock.

        Row of the request:  [0, protected) the tree's | [protected, aligned) goes to the tree now
        | [aligned, end) a page begun, stays the request's own.
        """
        ids = req.get_fill_ids()
        row, end = req.req_pool_idx, len(ids)
        if self.keep:
            start, aligned = req.cache_protected_len, end // self.page_size * self.page_size
            own = self.page_table.get(row)
            handed = (aligned - start) // self.page_size
            adapter, salt = self.namespace(req)
            share = self.tenancy.kv_share(req)
            self.page_table.replace(row, own[handed:])
            result = self.tree.insert(
                adapter, _tokens(ids, aligned), own[:handed], start=start, salt=salt, share=share
            )
            if result.duplicates:
                # The tree had these tokens already: from here on the request reads the tree's.
                indices = upload(self.pool.layout.dense_ids(result.pages), self.device)
                slots = (row, slice(start, aligned))
                self.req_to_token_pool.write(slots, indices[start:].to(torch.int32))
            # Lock the longer path before leaving the shorter one: the adapter is never unlocked.
            self.tree.lock(result.node)
            self.tree.unlock(req.last_node)
            req.last_node = result.node
            req.cache_protected_len = aligned
        req.prefix_indices = self.req_to_token_pool.req_to_token[row, :end].to(torch.int64)
        self._checked()

    def cache_finished_req(
        self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        """A request ends: its full pages go to the tree, the rest is freed, its lock goes."""
        start, size = req.cache_protected_len, self.page_size
        own = self.page_table.pop(req.req_pool_idx)
        handled = self.pool.layout.pages_for(kv_len_to_handle) - start // size
        assert len(own) == handled, f"{len(own)} pages for {kv_len_to_handle} tokens from {start}"
        aligned = kv_len_to_handle // size * size
        handed = 0
        if is_insert and self.keep and aligned > start:
            handed = (aligned - start) // size
            adapter, salt = self.namespace(req)
            tokens = _tokens(req.origin_input_ids + req.output_ids, aligned)
            share = self.tenancy.kv_share(req)
            self.tree.insert(adapter, tokens, own[:handed], start=start, salt=salt, share=share)
        self.pool.ledger.give(own[handed:], Owner.KV_RUNNING)
        if req.last_node is not None:
            self.tree.unlock(req.last_node)
            self.residency.purge()
        self._checked()

    # ---- locks, eviction, counters

    def inc_lock_ref(self, node: Node) -> IncLockRefResult:
        """Hold a path and its adapter."""
        before = self.tree.evictable
        self.tree.lock(node)
        return IncLockRefResult(delta=(self.tree.evictable - before) * self.page_size)

    def dec_lock_ref(self, node: Node, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Undo one `inc_lock_ref`."""
        before = self.tree.evictable
        self.tree.unlock(node)
        return DecLockRefResult(delta=(self.tree.evictable - before) * self.page_size)

    def evict(self, params: EvictParams) -> EvictResult:
        """Free pages for at least `num_tokens` tokens, of KV and adapters alike."""
        start = time.perf_counter()
        pages = self.pool.layout.pages_for(params.num_tokens)
        freed = self.tree.evict(pages, incoming=self.incoming) * self.page_size
        self.update_eviction_metrics(freed, start)
        self._checked()
        return EvictResult(num_tokens_evicted=freed)

    def evictable_size(self) -> int:
        """Tokens' worth of pages that nobody holds, weights included.

        While a request is considered (`asking`) only those that it may count upon: what floors
        of other tenants keep is not there for it, so this may be negative.
        """
        if self._asking is not None:
            return self.tree.shares.reach(self._asking) * self.page_size
        return self.tree.evictable * self.page_size

    @contextmanager
    def asking(self, req: Any) -> Iterator[None]:
        """Until the block ends, sizes are those that this request may count upon."""
        self._asking = self.tenancy.share(req)
        try:
            yield
        finally:
            self._asking = None

    def full_evictable_size(self) -> int:
        """As `evictable_size`: there is one kind of KV."""
        return self.evictable_size()

    def protected_size(self) -> int:
        """Tokens' worth of pages that requests hold, weights included."""
        return self.tree.protected * self.page_size

    def full_protected_size(self) -> int:
        """As `protected_size`: there is one kind of KV."""
        return self.protected_size()

    def total_size(self) -> int:
        """Tokens' worth of pages in the tree."""
        return self.evictable_size() + self.protected_size()

    def reset(self) -> None:
        """A flush: everything on the device is forgotten; adapters stay known, or pinned."""
        self.page_table.clear()
        self.residency.pins.reset()
        self._checked()

    def sanity_check(self) -> None:
        """SGLang's idle check; ours walks the whole tree, so only where it was asked for."""
        self._checked()

    def pretty_print(self) -> None:
        """SGLang calls this just before it gives up for want of memory."""
        print(self.available_and_evictable_str(), end="")  # noqa: T201
        for node in self.tree.adapters():
            print(  # noqa: T201
                f"{(node.identity or 'base')[:12]:12} {node.state.value:8} pages={len(node.pages)}"
                f" kv={node.kv_pages} locks={node.lock}"
            )

    def namespace(self, req: Any) -> tuple[AdapterNode, str]:
        """The request's adapter node, and the client's part of SGLang's namespace string.

        A registration that has gone meanwhile gets the base model's node here; the admission hook
        ends such a request before anything is computed for it.
        """
        salt = self.tenancy.read(req)[2]
        if req.lora_id is None:
            return self.tree.base, salt
        return self.residency.node(req.lora_id) or self.tree.base, salt

    def check_now(self) -> None:
        """Walk everything, if that was asked for."""
        self._checked()

    def _checked(self) -> None:
        if self.check:
            self.pool.check_invariants()
            self.tiers.check_invariants()
            self.page_table.check_invariants(self.tree.shares)
            running = self.pool.ledger.count(Owner.KV_RUNNING)
            held = self.page_table.pages()
            # Pages of an allocation that its request's row has not received yet are not counted.
            assert held <= running, f"requests own {held} pages, the ledger says {running}"


def register(make: Any) -> None:
    """Make `--radix-cache-backend graft` known to SGLang's registry; `make(ctx)` builds it."""

    def factory(ctx: TreeCacheBuildContext) -> GraftPrefixCache:
        cache: GraftPrefixCache = make(ctx)
        return cache

    register_radix_cache_backend(BACKEND, factory)
