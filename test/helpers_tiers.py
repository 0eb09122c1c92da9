"""A pool with tiers whose copies, forwards and disk reads happen when the test says so."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers_queues import FakeCopier, FakeExecutor, Tag

from sglang_graft.adapters import AdapterImage
from sglang_graft.cache import AdapterNode, Lru, Node, Prices, UnifiedTree
from sglang_graft.cache.policy import EvictionPolicy
from sglang_graft.cache.runs import below
from sglang_graft.pool import Owner, PageLedger
from sglang_graft.tiers import (
    AdapterStore,
    Counters,
    Images,
    MeasuredRates,
    Packed,
    Prefetch,
    Tiers,
    Transfers,
    Wish,
    WriteBack,
)

PAGE_BYTES = 1024
PAGE_TOKENS = 2
Run = tuple[int, ...]


def packed(number: int, rows: int, identity: str) -> Packed:
    """An image whose row i reads (number, i)."""
    pages = torch.tensor([[number, row] for row in range(rows)], dtype=torch.uint8)
    none = np.zeros(0, dtype=np.int64)
    image = AdapterImage(
        identity=identity,
        pages=pages.new_empty((rows, 0)),
        tile=none.astype(np.int32),
        page=none.astype(np.int32),
        offset=none,
        ranks=none.astype(np.int32),
        scales=none.astype(np.float32),
        nbytes=0,
    )
    return Packed(image, pages.view(rows, 2), 8, ())


def weight_tag(number: int, row: int) -> Tag:
    return ("weights", number, row)


def kv_tag(identity: str | None, salt: str, run: Run) -> Tag:
    return ("kv", identity, salt, run)


def tokens_of(run: Run) -> array[int]:
    return array("q", [token for page in run for token in (page, page + 10)])


@dataclass(eq=False)
class Disk:
    """Adapter folders by number."""

    sizes: dict[int, int] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    copies: dict[int, int] = field(default_factory=dict)
    """Folders that hold the adapter of another number."""

    def read(self, path: Path) -> Packed:
        folder = int(path.name)
        if folder in self.missing:
            raise FileNotFoundError(f"{path} is gone")
        number = self.copies.get(folder, folder)
        identity = f"other {folder}" if folder in self.changed else f"adapter {number}"
        return packed(number, self.sizes[number], identity)


@dataclass(eq=False)
class Request:
    """One page of the prompt is one number of `run`; `node` and `own` while it runs."""

    key: str
    number: int | None
    wish: Wish
    run: Run
    salt: str
    node: Node | None = None
    cached: int = 0
    own: list[int] = field(default_factory=list)


class World:
    """A pool, its tiers and a scheduler that uses them as SGLang does."""

    def __init__(
        self, pages: int, host_pages: int, policy: EvictionPolicy | None = None, **prefetch: Any
    ) -> None:
        self.ledger = PageLedger(pages + 1)
        self.host = PageLedger(host_pages + 1)
        self.tree = UnifiedTree(
            self.ledger, page_tokens=PAGE_TOKENS, policy=policy or Lru(), host=self.host
        )
        self.copier = FakeCopier()
        self.executor = FakeExecutor()
        self.disk = Disk()
        self.counters = Counters()
        prices = getattr(self.tree.policy, "prices", None) or Prices(PAGE_BYTES, PAGE_TOKENS)
        self.rates = MeasuredRates(self.tree, prices, window=16)
        meter = self.rates.meter
        meter.smallest_copy = 1
        self.transfers = Transfers(
            self.tree, self.copier, on_loaded=lambda pages, s: meter.h2d(pages * PAGE_BYTES, s)
        )
        self.store = AdapterStore(self.disk.read, self.write_image, executor=self.executor)
        self.images = Images(self.tree, self.store, self.counters)
        self.prefetch = Prefetch(
            tree=self.tree,
            transfers=self.transfers,
            images=self.images,
            counters=self.counters,
            rates=self.rates.meter,
            now=lambda: float(self.tree.clock),
            page_bytes=PAGE_BYTES,
            paths=lambda node: (str(node.identity), Path(str(node.identity).split()[-1])),
            **prefetch,
        )
        self.tiers = Tiers(
            tree=self.tree,
            transfers=self.transfers,
            images=self.images,
            prefetch=self.prefetch,
            counters=self.counters,
            rates=self.rates,
            page_bytes=PAGE_BYTES,
            write_back=WriteBack(self.tree, self.transfers, self.counters, ahead=6, under_way=8),
        )
        self.nodes: dict[int, AdapterNode] = {}
        self.loading: dict[int, Future[Packed]] = {}
        self.queue: list[Request] = []
        self.running: list[Request] = []
        self.log: list[Tag] = []
        self.touched: dict[int, int] = {}
        """The last forward that reads or writes a page; the first is 1."""
        self._names = 0

    def write_image(self, pages: Sequence[int], image: torch.Tensor) -> None:
        for page, row in zip(pages, image.tolist(), strict=True):
            self.copier.host[page] = weight_tag(*row)

    # ---- adapters

    def register(self, number: int, size: int) -> None:
        """Begin to load an adapter; it is known once its file was read (`finish_loads`)."""
        self.disk.sizes.setdefault(number, size)
        if number not in self.nodes and number not in self.loading:
            self.loading[number] = self.executor.submit(self.disk.read, Path(f"/adapters/{number}"))

    def finish_loads(self) -> None:
        """Register what was read, in the order in which it was asked for."""
        while self.loading and next(iter(self.loading.values())).done():
            number = next(iter(self.loading))
            future = self.loading.pop(number)
            if future.exception() is not None:
                self.log.append(("refused", number))
                continue
            node = self.tree.add_adapter(f"adapter {number}", self.disk.sizes[number])
            self.nodes[number] = node
            self.tiers.offer(node, future.result())
            self.log.append(("registered", number))

    def unload(self, number: int) -> None:
        node = self.nodes.pop(number, None)
        if node is None:
            return
        self.queue = [r for r in self.queue if r.number != number]
        self.tiers.forget(node)
        self.log.append(("unloaded", number, self.tree.drop(node)))

    def retire(self, number: int) -> None:
        """Its name is gone: what nobody holds is freed, and requests that came before go on."""
        if number in self.nodes:
            self.log.append(("retired", number, self.tree.trim(self.nodes[number])))

    # ---- requests

    def enqueue(self, number: int | None, run: Run, salt: str = "") -> Request | None:
        node = self.tree.base if number is None else self.nodes.get(number)
        if node is None or node.weight_pages + len(run) + 2 > self.ledger.total:
            return None
        self._names += 1
        wish = Wish(f"r{self._names}", node, tokens_of(run), salt)
        request = Request(wish.key, number, wish, run, salt)
        self.queue.append(request)
        return request

    def abort(self, index: int) -> None:
        if self.queue:
            self.queue.pop(index % len(self.queue))

    def step(self) -> None:
        """One scheduling pass: fail, pass over or start the requests in the queue."""
        self.finish_loads()
        self.ledger.reserve = len(self.running)
        self.tiers.step([request.wish for request in self.queue])
        full, skipped = False, []
        for request in list(self.queue):
            failure = self.prefetch.failure(request.wish)
            if failure is not None:
                self.queue.remove(request)
                self.log.append(("failed", request.key, failure))
                continue
            if full:
                break
            before = {r.key: self.prefetch.overtaken(r.key) for r in skipped}
            if not self.prefetch.may_start(request.wish):
                skipped.append(request)
                continue
            for earlier in skipped:
                self.check_not_overtaken(earlier, before[earlier.key])
            full = not self.start(request)
        self.log.append(("pass", [r.key for r in self.running], sorted(self.tree.ledger._stack)))

    def check_not_overtaken(self, request: Request, before: int) -> None:
        on_host = self.tree.host is not None and self.tree.host.is_readable(request.wish.node)
        assert before <= self.prefetch.patience or not on_host, (
            f"{request.key} was overtaken {before} times"
        )

    def start(self, request: Request) -> bool:
        found = self.tree.match(request.wish.node, tokens_of(request.run), salt=request.salt)
        self.tree.lock(found.node)
        need = len(request.run) - len(found.pages) + 1
        pages = self.take(need, promised=len(self.running))
        if pages is None:
            self.tree.unlock(found.node)
            return False
        self.tree.use(found.node)
        self.queue.remove(request)
        self.running.append(request)
        request.node, request.cached, request.own = found.node, len(found.pages), pages
        self.launch([request], prefix={request.key: found.pages})
        return True

    def take(self, n: int, promised: int = 0) -> list[int] | None:
        if n + promised > self.ledger.free + self.tree.evictable:
            return None
        self.tree.evict(n - self.ledger.free)
        return self.ledger.take(n, Owner.KV_RUNNING)

    def launch(self, requests: list[Request], prefix: dict[str, list[int]] | None = None) -> None:
        """A forward: reads weights and the prefix, writes the requests' own pages."""
        self.tiers.before_forward()
        reads: dict[int, Tag] = {}
        writes: dict[int, Tag] = {}
        for request in requests:
            node = request.wish.node
            if request.number is not None:
                for row, page in enumerate(node.pages):
                    reads[page] = weight_tag(request.number, row)
            for place, page in enumerate((prefix or {}).get(request.key, [])):
                reads[page] = self.tag(request, place)
            for place, page in enumerate(request.own):
                writes[page] = self.tag(request, request.cached + place)
        self.touched.update(dict.fromkeys([*reads, *writes], self.ledger.forwards))
        self.copier.forward(reads, writes)

    def tag(self, request: Request, place: int) -> Tag:
        return kv_tag(request.wish.node.identity, request.salt, request.run[: place + 1])

    def decode(self) -> None:
        """Every running request grows by a page; who finds none is retracted."""
        for request in list(self.running):
            pages = self.take(1)
            if pages is None:
                self.retract(request)
                continue
            request.own += pages
            request.run += (3,)
        if self.running:
            self.launch(self.running)

    def retract(self, request: Request) -> None:
        assert request.node is not None, f"{request.key} does not run"
        self.running.remove(request)
        self.ledger.give(request.own, Owner.KV_RUNNING)
        self.tree.unlock(request.node)
        request.node, request.own = None, []
        if not request.wish.node.dropped:
            self.queue.append(request)
            request.wish = Wish(
                request.key, request.wish.node, tokens_of(request.run), request.salt
            )

    def finish(self, index: int, *, half: bool = False) -> None:
        """A request ends and its full pages go to the tree; with `half` it goes on (a chunk)."""
        if not self.running:
            return
        request = self.running[index % len(self.running)]
        assert request.node is not None, f"{request.key} does not run"
        full = len(request.run) - request.cached
        done = self.tree.insert(
            request.wish.node,
            tokens_of(request.run),
            request.own[:full],
            start=request.cached * PAGE_TOKENS,
            salt=request.salt,
        )
        rest = request.own[full:]
        if half:
            self.tree.lock(done.node)
            self.tree.unlock(request.node)
            request.node, request.cached, request.own = done.node, len(request.run), rest
            return
        self.ledger.give(rest, Owner.KV_RUNNING)
        self.tree.unlock(request.node)
        self.running.remove(request)

    def flush(self) -> None:
        if not self.running and not self.queue:
            self.tree.reset()

    # ---- checks

    def settle(self) -> None:
        """Run all that was started, and let the tiers see it."""
        for _ in range(4):
            self.copier.drain()
            while self.executor.advance():
                pass
            self.finish_loads()
            self.tiers.step([request.wish for request in self.queue])
        self.copier.drain()
        self.transfers.poll()
        self.check_bytes()

    def rest(self) -> None:
        """While nothing else happens, copies come to an end."""
        if self.queue:
            return
        passes = 0
        while passes == 0 or not self.transfers.idle:
            self.copier.drain()
            self.tiers.step([])
            passes += 1
            assert passes < 50, "write-back makes copies without end"

    def check_bytes(self) -> None:
        """With no copy under way, every page of every node holds what the node says."""
        for adapter in self.tree.adapters():
            number = int(adapter.identity.split()[-1]) if adapter.identity else 0
            tags = [weight_tag(number, row) for row in range(adapter.weight_pages)]
            self.check_node(adapter, tags)
            for node in adapter.children.values():
                page_bytes = 8 * PAGE_TOKENS
                salt = node.edge[page_bytes:].decode()
                self.check_path(node, salt, ())

    def check_path(self, node: Node, salt: str, above: Run) -> None:
        run = above + tuple(array("q", node.key)[::PAGE_TOKENS])
        places = range(len(above), len(run))
        identity = node.adapter.identity
        self.check_node(node, [kv_tag(identity, salt, run[: place + 1]) for place in places])
        for child in node.children.values():
            self.check_path(child, salt, run)

    def check_node(self, node: Node, tags: list[Tag]) -> None:
        for page, tag in zip(node.pages, tags, strict=False):
            found = self.copier.device.get(page)
            assert found == tag, f"device page {page}: wanted {tag}, found {found}"
        copied = node.host.pages if node.host and self.tree.host.is_readable(node) else []
        for page, tag in zip(copied, tags, strict=False):
            found = self.copier.host.get(page)
            assert found == tag, f"host page {page}: wanted {tag}, found {found}"

    def check(self) -> None:
        self.tree.check_invariants()
        self.ledger.check_invariants()
        self.tiers.check_invariants()
        own = sum(len(request.own) for request in self.running)
        assert own == self.ledger.count(Owner.KV_RUNNING)
        parts = self.ledger.free + self.tree.evictable + self.tree.protected + own
        assert parts == self.ledger.total
        self.check_last_forwards()

    def check_last_forwards(self) -> None:
        """Pages that nobody holds say which forwards a load into them has to come after."""
        said = {page: self.ledger.last_forward([page]) for page in self.ledger.pages_of(Owner.FREE)}
        for adapter in (self.tree.base, *self.tree.adapters()):
            for node in (adapter, *below(adapter)):
                if not node.lock:
                    said |= dict.fromkeys(node.pages, node.last_forward)
        for page, last in said.items():
            touched = self.touched.get(page, 0)
            assert touched <= last, f"page {page}: forward {touched} has it, {last} is said"
