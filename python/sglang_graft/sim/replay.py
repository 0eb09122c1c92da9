"""A schedule against the real tree and a policy: what is hit, moved and computed again.

Cost in seconds: bytes copied from host to device and read from disk at their rates, plus prefill of
every prompt token that was not cached. Copies from the device to the host are counted in bytes
only: they run beside everything and nobody waits for them.

TTFT is an estimate on top: the requests come when the schedule says, prefills take turns on the
device, copies take turns on the link, reads on the disk. With prefetch a request's reads and copies
start when it comes; without, when its turn has come, and the device waits for them.

Who knows better when requests are admitted and end (`steps`) calls `begin_pass`, `may_start`,
`admit`, `here_at`, `grow`, `retract` and `end` and leaves `run`, its schedule and its TTFT aside.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_graft.cache import AdapterNode, EvictionPolicy, Node, State, UnifiedTree
from sglang_graft.cache.rates import Rates
from sglang_graft.cache.runs import TOKEN_BYTES
from sglang_graft.pool.ledger import Owner, PageLedger
from sglang_graft.sim.links import Links
from sglang_graft.sim.schedule import Schedule, Server
from sglang_graft.sim.tiers import DeviceAlone, Moved, ThreeTiers, Tiers
from sglang_graft.sim.trace import Demand, Trace
from sglang_graft.tiers.wish import Wish

# Appended to an adapter's name where its KV is kept apart from its weights.
_SPACE = "/kv"
_NOTHING: array[int] = array("q")
# Write-back looks this share of the pool ahead of eviction, and at least two chunks of prefill: a
# chunk takes its pages at once, and what it takes without a copy is lost.
_AHEAD_SHARE = 8
_AHEAD_CHUNKS = 2


@dataclass(slots=True)
class Totals:
    """What a replay counted."""

    requests: int = 0
    prompt_tokens: int = 0
    device_tokens: int = 0
    """Prompt tokens whose KV was on the device, when the request came."""
    host_tokens: int = 0
    """Others that were cached when it was admitted: from the host, or computed meanwhile."""
    adapter_hits: int = 0
    """Requests that found their adapter; who comes back after a retraction is not counted again."""
    adapter_loads: int = 0
    disk_reads: int = 0
    h2d_bytes: int = 0
    disk_bytes: int = 0
    stored_bytes: int = 0
    """Written back to the host."""
    idle_bytes: int = 0
    """Copied to the device while nobody waited; no part of the cost, as nobody waits for them."""
    invalid_kv_pages: int = 0
    """Cached KV without its adapter, summed over admissions; 0 with the dependency rule."""
    sampled_kv_pages: int = 0
    prefill_seconds: float = 0.0
    """With what retracted requests compute again."""
    h2d_seconds: float = 0.0
    disk_seconds: float = 0.0

    @property
    def cost_seconds(self) -> float:
        """Everything that was paid."""
        return self.prefill_seconds + self.h2d_seconds + self.disk_seconds


@dataclass(slots=True)
class Service:
    """What one request's admission cost, in seconds.   known: prompt tokens that were cached."""

    disk: float = 0.0
    copy: float = 0.0
    prefill: float = 0.0
    known: int = 0


@dataclass(slots=True)
class _Running:
    node: Node
    adapter: AdapterNode
    locked: int  # tokens on the path that `node` locks
    pages: list[int]  # those behind it


@dataclass(slots=True)
class Replay:
    """One run; `totals` and `ttft_s` (by request) are its results."""

    trace: Trace
    plan: Schedule
    server: Server
    policy: EvictionPolicy
    host_pages: int = 0
    prefetch: bool = True
    dependency_rule: bool = True
    """False: weights leave whatever KV they have, which stays and is invalid meanwhile."""
    idle_promotion: bool = False
    check: bool = False
    totals: Totals = field(default_factory=Totals)
    ttft_s: list[float] = field(default_factory=list)
    ledger: PageLedger = field(init=False)
    tree: UnifiedTree = field(init=False)
    tiers: Tiers = field(init=False)
    _running: dict[int, _Running] = field(default_factory=dict)
    _free_at: float = 0.0
    links: Links = field(init=False)
    _wishes: dict[tuple[int, int], Wish] = field(default_factory=dict)
    _found: dict[int, tuple[bool, int]] = field(default_factory=dict)
    """With a host tier, of requests that waited: whether the device had their weights when they
    came, and how many tokens of their prompts."""

    def __post_init__(self) -> None:
        sizes = self.trace.sizes
        self.links = Links(self.server.rates)
        self.ledger = PageLedger(self.server.pages + 1)
        host = PageLedger(self.host_pages + 1) if self.host_pages else None
        self.tree = UnifiedTree(
            self.ledger, page_tokens=sizes.page_tokens, policy=self.policy, host=host
        )
        self.tiers = DeviceAlone(self.tree)
        if host is not None:
            chunk = sizes.pages_for(self.server.chunk_tokens)
            ahead = max(_AHEAD_CHUNKS * chunk, self.server.pages // _AHEAD_SHARE)
            ahead = min(ahead, self.server.pages)
            most = {} if self.prefetch else {"lookahead": 1}
            self.tiers = ThreeTiers(self.tree, self.server.rates, sizes.page_bytes, ahead, **most)
        for index, spec in enumerate(self.trace.workload.adapters):
            pages = self.trace.weight_pages(index)
            if host is not None and pages > host.total:
                raise ValueError(
                    f"--host-gb: wanted room for {pages} pages, the largest adapter, "
                    f"got {host.total}; 0 is no host tier"
                )
            self.tree.add_adapter(spec.name, pages)
            if not self.dependency_rule:
                space = self.tree.add_adapter(spec.name + _SPACE, 0)
                self.tree.load(space)
                self.tree.loaded(space)

    def run(self) -> Totals:
        """Play every event."""
        self.ttft_s = [0.0] * len(self.trace.demands)
        idle_until = self._nobody_waits_until() if self.idle_promotion else []
        for place, event in enumerate(self.plan.events):
            if event.admitted:
                service = self.admit(event.request)
                self._time(event.request, service)
            else:
                self.end(event.request)
            if self.idle_promotion:
                self._promote_idle(event.at_s, idle_until[place])
            if self.check:
                self.check_invariants()
        self.totals.stored_bytes = self.tiers.moved.stored * self.trace.sizes.page_bytes
        return self.totals

    def check_invariants(self) -> None:
        """Assert that tree, pages and tiers agree."""
        self.tree.check_invariants()
        self.ledger.check_invariants()
        self.tiers.check_invariants()

    def begin_pass(self, queue: Sequence[tuple[int, int]], now: float) -> None:
        """The scheduler turns to its queue, requests and tokens that each has made: what is about
        to leave is copied, and what the first ones need begins to move."""
        self.tiers.begin_pass([self._wish(*waiting) for waiting in queue])
        page, totals = self.trace.sizes.page_bytes, self.totals
        for node, pages, is_read in self.tiers.begun():
            size = pages * page
            if is_read:
                totals.disk_reads += 1
                totals.disk_bytes += size
                totals.disk_seconds += self.links.read(node, size, now)
            else:
                totals.adapter_loads += isinstance(node, AdapterNode)
                totals.h2d_bytes += size
                totals.h2d_seconds += self.links.copy(node, size, now)

    def may_start(self, index: int, made: int) -> bool:
        """Whether a request of the queue may be admitted in this pass; ask in its order."""
        return self.tiers.may_start(self._wish(index, made))

    def here_at(self, index: int, made: int) -> float:
        """When all that it found has landed, if it is admitted now."""
        wish = self._wish(index, made)
        return self.links.here_at((wish.node, *self._landed(wish.node, wish.tokens)))

    def _wish(self, index: int, made: int) -> Wish:
        found = self._wishes.get((index, made))
        if found is None:
            adapter, usable = self._asked(index)
            found = self._wishes[index, made] = Wish(f"{index} {made}", adapter, usable)
            if self.tree.host is not None:
                here = sum(len(n.key) for n in self._landed(adapter, usable)) // TOKEN_BYTES
                self._found.setdefault(index, (adapter.state is State.RESIDENT, here))
        return found

    @property
    def rates(self) -> Rates:
        """The prices of the modelled device."""
        return self.server.rates

    def admit(self, index: int, made: int | None = None) -> Service:
        """What the request finds is matched and brought; pages are taken for its prompt and, with
        `made`, for so many tokens of its answer (0: it is new) and the next one, with None for its
        whole answer. One that comes back with a part of its answer is no new demand: what it brings
        and computes again counts, its hits do not."""
        demand = self.trace.demands[index]
        tokens = self.trace.workload.requests[index].tokens()
        adapter, usable = self._asked(index)
        space = self._space(adapter)
        here = sum(len(node.key) for node in self._landed(space, usable)) // TOKEN_BYTES
        before = self.tiers.moved.copy()
        self.tiers.bring(str(index), adapter, usable if space is adapter else _NOTHING)
        self.tree.lock(adapter)
        self.tiers.step(self.tiers.moved.weights + self.tiers.moved.kv - before.weights - before.kv)
        if space is not adapter:
            self.tiers.bring(f"{index}{_SPACE}", space, usable)
        match = self.tree.match(space, usable)
        self.tree.lock(match.node)
        known = len(match.pages) * self.tree.page_tokens
        service = self._service(demand.prompt + (made or 0), before, known)
        if not made:
            self.tree.use(match.node)
            if space is not adapter:
                self.tree.use(adapter)
            warm, here = self._found.get(index, (self.tiers.moved.weights == before.weights, here))
            self._count(demand, min(here, known), known)
            self.totals.adapter_hits += warm
        upto = demand.total if made is None else demand.prompt + made + 1
        self._keep(index, adapter, match.node, tokens[:upto], known)
        if not self.dependency_rule:
            self._sample()
        return service

    def _asked(self, index: int) -> tuple[AdapterNode, array[int]]:
        """The adapter of a request, and the part of its prompt that may be cached."""
        demand = self.trace.demands[index]
        adapter = self.tree.adapter(self.trace.workload.adapters[demand.adapter].name)
        assert adapter is not None, f"the adapter of request {index} is not registered"
        return adapter, self.trace.workload.requests[index].tokens()[: demand.usable]

    def _promote_idle(self, now: float, until: float) -> None:
        """While the link is free and nobody waits."""
        page_s = self.rates.load_seconds(self.trace.sizes.page_bytes)
        start = max(now, self.links.link_at)
        most = int((until - start) / page_s)
        if most > 0:
            pages = self.tiers.promote_idle(most)
            self.links.link_at = start + pages * page_s
            self.totals.idle_bytes += pages * self.trace.sizes.page_bytes

    def _nobody_waits_until(self) -> list[float]:
        """For each event: when the next one is, or a request comes (or has come) before it."""
        events, found = self.plan.events, []
        ready = 0.0  # behind the last event there is nothing to do
        for event, after in zip(reversed(events), (events[-1], *reversed(events)), strict=False):
            found.append(min(ready, after.at_s))
            if event.admitted:
                ready = self.plan.ready_s[event.request]
        return found[::-1]

    def _landed(self, space: AdapterNode, tokens: array[int]) -> list[Node]:
        """The nodes of the prefix that the device has before anything is brought."""
        return [node for node in self.tree.peek(space, tokens) if node.pages]

    def _service(self, tokens: int, before: Moved, known: int) -> Service:
        """What was moved since `before`, and what of `tokens` is to be computed, in seconds."""
        moved, totals, page = self.tiers.moved, self.totals, self.trace.sizes.page_bytes
        read = (moved.read - before.read) * page
        copied = (moved.weights + moved.kv - before.weights - before.kv) * page
        totals.disk_bytes += read
        totals.h2d_bytes += copied
        totals.disk_reads += read > 0
        totals.adapter_loads += moved.weights > before.weights
        service = Service(
            self.rates.read_seconds(read),
            self.rates.load_seconds(copied),
            self.rates.prefill_seconds(tokens - known, known),
            known,
        )
        totals.disk_seconds += service.disk
        totals.h2d_seconds += service.copy
        totals.prefill_seconds += service.prefill
        return service

    def _space(self, adapter: AdapterNode) -> AdapterNode:
        """The node below which the adapter's KV is."""
        if self.dependency_rule:
            return adapter
        space = self.tree.adapter(f"{adapter.identity}{_SPACE}")
        assert space is not None, f"adapter {adapter.identity} has no space for KV"
        return space

    def _sample(self) -> None:
        """Add this moment to the share of cached KV whose adapter is absent."""
        invalid = sum(
            self._space(adapter).kv_pages
            for spec in self.trace.workload.adapters
            if (adapter := self.tree.adapter(spec.name)) and adapter.state is State.ABSENT
        )
        self.totals.invalid_kv_pages += invalid
        self.totals.sampled_kv_pages += self.ledger.count(Owner.KV_CACHED)

    def _keep(
        self, index: int, adapter: AdapterNode, held: Node, tokens: array[int], known: int
    ) -> None:
        """Pages for these tokens; the prompt goes to the tree as after a prefill."""
        demand, tree = self.trace.demands[index], self.tree
        size, space = tree.page_tokens, self._space(adapter)
        aligned = demand.prompt // size * size
        path = self._landed(space, tokens[:aligned])
        if sum(len(node.key) for node in path) // TOKEN_BYTES > known:
            # The page of the last token is computed again, and another one with it is there: in the
            # schedule both are one page.
            known = aligned
            whole = tree.match(space, tokens[:aligned]).node
            tree.lock(whole)
            tree.unlock(held)
            held = whole
        pages = self._taken(index, self.trace.sizes.pages_for(len(tokens)) - known // size)
        handed = (aligned - known) // size
        done = tree.insert(space, tokens[:aligned], pages[:handed], start=known)
        tree.lock(done.node)
        tree.unlock(held)
        self._running[index] = _Running(done.node, adapter, aligned, pages[handed:])

    def _taken(self, index: int, count: int) -> list[int]:
        pages: list[int] = []
        for wanted in self._chunks(count):
            self.tree.evict(wanted - self.ledger.free)
            taken = self.ledger.take(wanted, Owner.KV_RUNNING)
            assert taken is not None, f"no room for request {index}: the schedule is wrong"
            pages += taken
            self.tiers.step(wanted)
        return pages

    def _chunks(self, pages: int) -> Iterator[int]:
        """A long prompt is computed in chunks, and takes its pages chunk by chunk."""
        most = self.trace.sizes.pages_for(self.server.chunk_tokens)
        while pages > 0:
            yield min(pages, most)
            pages -= most

    @property
    def room(self) -> int:
        """Pages that are free, or held by no running request."""
        return self.ledger.free + self.tree.evictable

    def grow(self, index: int, made: int) -> None:
        """A running request has `made` tokens of its answer: pages up to them, within `room`."""
        running, demand = self._running[index], self.trace.demands[index]
        held = running.locked // self.tree.page_tokens + len(running.pages)
        wanted = self.trace.sizes.pages_for(demand.prompt + made) - held
        if wanted > 0:
            running.pages += self._taken(index, wanted)

    def retract(self, index: int) -> None:
        """It stops running, and what is computed of its answer is lost."""
        running = self._running.pop(index)
        self.ledger.give(running.pages, Owner.KV_RUNNING)
        self.tree.unlock(running.node)
        self.tree.unlock(running.adapter)

    def end(self, index: int) -> None:
        """Its answer goes to the tree, and its locks are given back."""
        running = self._running.pop(index)
        tokens = self.trace.workload.requests[index].tokens()
        size = self.tree.page_tokens
        aligned = len(tokens) // size * size
        handed = (aligned - running.locked) // size
        pages, space = running.pages, self._space(running.adapter)
        self.tree.insert(space, tokens[:aligned], pages[:handed], start=running.locked)
        self.ledger.give(pages[handed:], Owner.KV_RUNNING)
        self.tree.unlock(running.node)
        self.tree.unlock(running.adapter)
        self.tiers.step(len(tokens) // size)

    def _count(self, demand: Demand, on_device: int, known: int) -> None:
        self.totals.requests += 1
        self.totals.prompt_tokens += demand.prompt
        self.totals.device_tokens += on_device
        self.totals.host_tokens += known - on_device

    def _time(self, index: int, service: Service) -> None:
        """One more request through disk, link and device."""
        ready = self.plan.ready_s[index]
        start = ready if self.prefetch else max(ready, self._free_at)
        copied = self.links.landed(start, service.disk, service.copy)
        self._free_at = max(copied, self._free_at) + service.prefill
        self.ttft_s[index] = self._free_at - ready


def summary(totals: Totals, ttft_s: list[float]) -> dict[str, Any]:
    """Totals and TTFT as plain numbers."""
    ordered = sorted(ttft_s)
    last = len(ordered) - 1
    return {
        **asdict(totals),
        "cost_seconds": totals.cost_seconds,
        "ttft_mean_s": sum(ordered) / len(ordered),
        "ttft_p50_s": ordered[last // 2],
        "ttft_p99_s": ordered[last * 99 // 100],
    }
