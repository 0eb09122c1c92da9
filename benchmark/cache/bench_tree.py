"""Is the unified tree as fast as SGLang's stock RadixCache, and is eviction flat in its size?

    python benchmark/cache/bench_tree.py [--nodes 1000 10000] [--repeats 5] [--json]

Both trees see the same seeded requests: 8 adapters, 8 shared prefixes each (256-1024 tokens),
bodies of 64-1024 tokens, 16 tokens a page. Stock gets the adapter's name as extra_key and int64 CPU
tensors as values, as it has in use. Three contestants take turns within a repeat:

    stock      RadixCache; its allocator only collects the freed page numbers, which favours it
    graft      UnifiedTree with its page ledger, in page numbers
    graft+ids  the same plus the conversions that an engine needs: page numbers to a tensor of
               token ids after a match, token ids to page numbers before an insert

Columns are microseconds for one match, one insert (of a request whose prefix was matched and
locked before, untimed) and one evicted node (calls of 128 pages). Each is the mean of one repeat;
the table shows the median over repeats with p20/p80. Ratios pair the contestants of a repeat.
Garbage collection is off while the clock runs. Every matched length must be the same in all three,
or the run ends without a number.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from array import array
from collections.abc import Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sglang_graft.cache import AdapterNode, Lru, Match, UnifiedTree
from sglang_graft.cache.runs import below
from sglang_graft.pool.layout import PageLayout
from sglang_graft.pool.ledger import Owner, PageLedger

PAGE = 16
ADAPTERS = 8
PREFIXES = 8
TIMED = 1000  # operations of each kind that are timed in a repeat
EVICT_PAGES, EVICT_CALLS = 128, 60
LAYOUT = PageLayout(layers=2, page_tokens=PAGE, kv_heads=1, head_dim=8, dtype=torch.bfloat16)
KINDS = ("match", "insert", "evict_node")
NOT_SHOWN = (
    "Not shown: GPU index tensors (stock keeps and concatenates them on the device), adapters that "
    "come and go (stock has none in its tree), policies other than LRU, and the share of all this "
    "in a served request."
)


class Requests:
    """Request i is the same for every contestant: (adapter, tokens), whole pages."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = np.random.default_rng(seed)
        sizes = rng.integers(256 // PAGE, 1024 // PAGE + 1, (ADAPTERS, PREFIXES)) * PAGE
        self.prefixes = [[rng.integers(0, 1 << 17, n) for n in row] for row in sizes]

    def full(self, i: int) -> tuple[int, np.ndarray]:
        rng = np.random.default_rng((self.seed, i))
        adapter, prefix = rng.integers(0, ADAPTERS), rng.integers(0, PREFIXES)
        pages = int(np.exp(rng.uniform(np.log(64 / PAGE), np.log(1024 / PAGE))))
        body = rng.integers(0, 1 << 17, pages * PAGE)
        return int(adapter), np.concatenate([self.prefixes[adapter][prefix], body])

    def query(self, i: int, count: int) -> tuple[int, np.ndarray]:
        """70 % a cached request and 100 new tokens, 20 % half of one and new tokens, 10 % new."""
        rng = np.random.default_rng((self.seed, i, 1))
        adapter, tokens = self.full(int(rng.integers(0, count)))
        tail, kind = rng.integers(0, 1 << 17, 100), rng.random()
        if kind < 0.7:
            return adapter, np.concatenate([tokens, tail])
        if kind < 0.9:
            return adapter, np.concatenate([tokens[: len(tokens) // 2], tail])
        return adapter, rng.integers(1 << 17, 1 << 18, len(tokens))


class Contestant(Protocol):
    """One call a step; the returned seconds cover the tree's own work only."""

    def match(self, adapter: int, tokens: array[int]) -> tuple[float, int]: ...
    def insert(self, adapter: int, tokens: array[int]) -> tuple[float, int]: ...
    def evict(self, calls: int) -> tuple[float, int]: ...


class Stock:
    def __init__(self, pages: int) -> None:
        self.freed: list[torch.Tensor] = []
        allocator = SimpleNamespace(device=torch.device("cpu"), free_segment=self._free)
        self.tree = RadixCache.create_simulated(mock_allocator=allocator, page_size=PAGE)
        self.next_id = PAGE

    def _free(self, ids: torch.Tensor, *, start_pos: int) -> None:
        self.freed.append(ids[::PAGE])

    def match(self, adapter: int, tokens: array[int]) -> tuple[float, int]:
        params = MatchPrefixParams(key=RadixKey(tokens, f"adapter-{adapter}"))
        begin = time.perf_counter()
        found = self.tree.match_prefix(params)
        return time.perf_counter() - begin, len(found.device_indices)

    def insert(self, adapter: int, tokens: array[int]) -> tuple[float, int]:
        key = RadixKey(tokens, f"adapter-{adapter}")
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        self.tree.inc_lock_ref(found.last_device_node)
        cached, size = len(found.device_indices), len(tokens)
        fresh = torch.arange(self.next_id, self.next_id + size - cached)
        self.next_id += size - cached
        params = InsertParams(key=key, value=torch.cat([found.device_indices, fresh]))
        begin = time.perf_counter()
        done = self.tree.insert(params)
        took = time.perf_counter() - begin
        self.tree.dec_lock_ref(found.last_device_node)
        return took, done.prefix_len

    def evict(self, calls: int) -> tuple[float, int]:
        self.freed.clear()
        begin = time.perf_counter()
        for _ in range(calls):
            done = self.tree.evict(EvictParams(num_tokens=EVICT_PAGES * PAGE))
            assert done.num_tokens_evicted >= EVICT_PAGES * PAGE, done
        return time.perf_counter() - begin, len(self.freed)


class Graft:
    def __init__(self, pages: int, *, with_ids: bool = False) -> None:
        self.with_ids = with_ids
        self.ledger = PageLedger(pages + ADAPTERS + 1)
        self.tree = UnifiedTree(self.ledger, page_tokens=PAGE, policy=Lru())
        self.adapters: list[AdapterNode] = []
        for name in range(ADAPTERS):
            adapter = self.tree.add_adapter(f"adapter-{name}", 1)
            self.tree.load(adapter)
            self.tree.loaded(adapter)
            self.adapters.append(adapter)

    def _match(self, adapter: int, tokens: array[int]) -> tuple[float, Match]:
        begin = time.perf_counter()
        found = self.tree.match(self.adapters[adapter], tokens)
        if self.with_ids:
            torch.from_numpy(LAYOUT.dense_ids(found.pages))
        return time.perf_counter() - begin, found

    def match(self, adapter: int, tokens: array[int]) -> tuple[float, int]:
        took, found = self._match(adapter, tokens)
        return took, len(found.pages) * PAGE

    def insert(self, adapter: int, tokens: array[int]) -> tuple[float, int]:
        _, found = self._match(adapter, tokens)
        self.tree.lock(found.node)
        cached = len(found.pages)
        pages = self.ledger.take(len(tokens) // PAGE - cached, Owner.KV_RUNNING)
        assert pages is not None, "the ledger is too small for the workload"
        ids = torch.from_numpy(LAYOUT.dense_ids(pages))
        begin = time.perf_counter()
        if self.with_ids:
            pages = LAYOUT.page_numbers(ids.numpy()[::PAGE]).tolist()
        done = self.tree.insert(self.adapters[adapter], tokens, pages, start=cached * PAGE)
        took = time.perf_counter() - begin
        self.tree.unlock(found.node)
        return took, done.cached_tokens_before

    def _count(self) -> int:
        return sum(sum(1 for _ in below(adapter)) for adapter in self.adapters)

    def evict(self, calls: int) -> tuple[float, int]:
        # Counting walks the whole tree: never between calls, which would find the caches cold.
        before = self._count()
        begin = time.perf_counter()
        for _ in range(calls):
            freed = self.tree.evict(EVICT_PAGES)
            assert freed >= EVICT_PAGES, freed
        return time.perf_counter() - begin, before - self._count()


CONTESTANTS: dict[str, Any] = {
    "stock": Stock,
    "graft": Graft,
    "graft+ids": lambda pages: Graft(pages, with_ids=True),
}


def as_array(tokens: np.ndarray) -> array[int]:
    flat = array("q")
    flat.frombytes(tokens.astype(np.int64).tobytes())
    return flat


def play(tree: Contestant, requests: Requests, count: int) -> tuple[dict[str, float], list[int]]:
    """Microseconds an operation, and every matched length along the way."""
    lengths: list[int] = []
    seconds = dict.fromkeys(KINDS, 0.0)
    operations = dict.fromkeys(KINDS, 0)

    def steps(kind: str, inputs: Iterator[tuple[int, np.ndarray]], timed_from: int) -> None:
        operate = tree.match if kind == "match" else tree.insert
        for place, (adapter, tokens) in enumerate(inputs):
            took, length = operate(adapter, as_array(tokens))
            lengths.append(length)
            if place >= timed_from:
                seconds[kind] += took
                operations[kind] += 1

    gc.collect()
    gc.disable()
    steps("insert", map(requests.full, range(count)), max(count // 2, count - TIMED))
    steps("match", (requests.query(i, count) for i in range(TIMED)), 0)
    seconds["evict_node"], operations["evict_node"] = tree.evict(min(EVICT_CALLS, count // 50))
    gc.enable()
    return {kind: 1e6 * seconds[kind] / operations[kind] for kind in KINDS}, lengths


def spread(values: list[float]) -> dict[str, float]:
    low, high = np.percentile(values, [20, 80])
    return {"p50": statistics.median(values), "p20": float(low), "p80": float(high)}


def measure(count: int, repeats: int) -> dict[str, Any]:
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    names = list(CONTESTANTS)
    for repeat in range(repeats):
        requests, seen = Requests(seed=repeat), {}
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            times, lengths = play(CONTESTANTS[name](count * 70 + 5000), requests, count)
            samples[name].append(times)
            seen[name] = lengths
        for name in names[1:]:
            assert seen[name] == seen["stock"], f"{name} matched other lengths than stock"
    row: dict[str, Any] = {"nodes": count, "us": {}, "ratio": {}}
    for name in names:
        row["us"][name] = {k: spread([t[k] for t in samples[name]]) for k in KINDS}
        if name != "stock":
            pairs = list(zip(samples[name], samples["stock"], strict=True))
            row["ratio"][name] = {k: spread([a[k] / b[k] for a, b in pairs]) for k in KINDS}
    return row


def show(row: dict[str, Any]) -> None:
    print(f"\nabout {row['nodes']} nodes; all matched lengths are the same")
    for what in ("us", "ratio"):
        for name, cells in row[what].items():
            line = "   ".join(
                f"{kind} {cell['p50']:8.2f} ({cell['p20']:.2f}-{cell['p80']:.2f})"
                for kind, cell in cells.items()
            )
            print(f"{what:>6} {name:<10} {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for count in args.nodes:
        rows.append(measure(count, args.repeats))
        show(rows[-1])
    print("\n" + NOT_SHOWN)
    if args.json:
        where = {"python": platform.python_version(), "machine": platform.machine()}
        versions = {name: version(name) for name in ("torch", "sglang")}
        print(json.dumps({"bench": "tree", **where, **versions, "page_tokens": PAGE, "rows": rows}))


if __name__ == "__main__":
    main()
