"""A schedule against the real tree and a policy: what is hit, moved and computed again.

Cost in seconds: bytes copied from host to device and read from disk at their rates, plus prefill of
every prompt token that was not cached. Copies from the device to the host are counted in bytes
only: they run beside everything and nobody waits for them.

TTFT is an estimate on top: the requests come when the schedule says, prefills take turns on the
device, copies take turns on the link, reads on the disk. With prefetch a request's reads and copies
start when it comes; without, when its turn has come, and the device waits for them.
"""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_graft.cache import AdapterNode, EvictionPolicy, Node, State, UnifiedTree
from sglang_graft.cache.rates import Rates
from sglang_graft.pool.ledger import Owner, PageLedger
from sglang_graft.sim.host import Host
from sglang_graft.sim.schedule import Schedule, Server
from sglang_graft.sim.trace import Demand, Trace

# Appended to an adapter's name where its KV is kept apart from its weights.
_SPACE = "/kv"


@dataclass(slots=True)
class Totals:
    """What a replay counted."""

    requests: int = 0
    prompt_tokens: int = 0
    device_tokens: int = 0
    """Prompt tokens whose KV was on the device."""
    host_tokens: int = 0
    """Prompt tokens whose KV came from the host."""
    adapter_hits: int = 0
    adapter_loads: int = 0
    disk_reads: int = 0
    h2d_bytes: int = 0
    disk_bytes: int = 0
    evicted_pages: int = 0
    invalid_kv_pages: int = 0
    """Cached KV without its adapter, summed over admissions; 0 with the dependency rule."""
    sampled_kv_pages: int = 0
    prefill_seconds: float = 0.0
    h2d_seconds: float = 0.0
    disk_seconds: float = 0.0

    @property
    def cost_seconds(self) -> float:
        """Everything that was paid."""
        return self.prefill_seconds + self.h2d_seconds + self.disk_seconds


@dataclass(slots=True)
class _Service:
    """What one request's admission cost."""

    disk: float = 0.0
    copy: float = 0.0
    prefill: float = 0.0


@dataclass(slots=True)
class _Running:
    node: Node
    adapter: AdapterNode
    tokens: array[int]
    locked: int  # tokens on the path that `node` locks
    pages: list[int]  # those behind it


@dataclass(slots=True)
class Replay:
    """One run; `totals` and `ttft_s` (by request) are its results."""

    trace: Trace
    plan: Schedule
    server: Server
    policy: EvictionPolicy
    host: Host
    prefetch: bool = True
    dependency_rule: bool = True
    """False: weights leave whatever KV they have, which stays and is invalid meanwhile."""
    check: bool = False
    totals: Totals = field(default_factory=Totals)
    ttft_s: list[float] = field(default_factory=list)
    ledger: PageLedger = field(init=False)
    tree: UnifiedTree = field(init=False)
    _running: dict[int, _Running] = field(default_factory=dict)
    _free_at: float = 0.0
    _link_at: float = 0.0
    _disk_at: float = 0.0

    def __post_init__(self) -> None:
        self.ledger = PageLedger(self.server.pages + 1)
        self.tree = UnifiedTree(
            self.ledger, page_tokens=self.trace.sizes.page_tokens, policy=self.policy
        )
        for index, spec in enumerate(self.trace.workload.adapters):
            self.tree.add_adapter(spec.name, self.trace.weight_pages(index))
            if not self.dependency_rule:
                space = self.tree.add_adapter(spec.name + _SPACE, 0)
                self.tree.load(space)
                self.tree.loaded(space)

    def run(self) -> Totals:
        """Play every event."""
        self.ttft_s = [0.0] * len(self.trace.demands)
        for event in self.plan.events:
            if event.admitted:
                service = self._admit(event.request)
                self._time(event.request, service)
            else:
                self._end(event.request)
            if self.check:
                self.tree.check_invariants()
                self.ledger.check_invariants()
                self.host.check_invariants()
        return self.totals

    @property
    def rates(self) -> Rates:
        """The prices of the modelled device."""
        return self.server.rates

    def _admit(self, index: int) -> _Service:
        demand, service = self.trace.demands[index], _Service()
        tokens = self.trace.workload.requests[index].tokens()
        name = self.trace.workload.adapters[demand.adapter].name
        adapter = self.tree.adapter(name)
        assert adapter is not None, f"adapter {name} is not registered"
        self._bring(adapter, service)
        self.tree.lock(adapter)
        space = self._space(adapter)
        match = self.tree.match(space, tokens[: demand.usable])
        self.tree.lock(match.node)
        self.tree.use(match.node)
        if space is not adapter:
            self.tree.use(adapter)
        on_device = len(match.pages) * self.tree.page_tokens
        on_host = self.host.cached(name, tokens[: demand.usable])
        known = self._promote(on_device, on_host, service)
        service.prefill += self.rates.prefill(demand.prompt - known, known)
        self._count(demand, on_device, known, service)
        self._keep(index, adapter, match.node, tokens, on_device)
        if not self.dependency_rule:
            self._sample()
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

    def _bring(self, adapter: AdapterNode, service: _Service) -> None:
        """Adapter onto the device."""
        identity, totals = adapter.identity, self.totals
        assert identity is not None, "the base model needs no load"
        if adapter.state is not State.ABSENT:
            totals.adapter_hits += 1
            return
        nbytes = adapter.weight_pages * self.trace.sizes.page_bytes
        if self.host.read(identity):
            totals.disk_reads += 1
            totals.disk_bytes += nbytes
            service.disk += self.rates.disk(nbytes)
        before = self.ledger.free
        pages = self.tree.load(adapter)
        assert pages is not None, f"no room for adapter {identity}: the schedule is wrong"
        totals.evicted_pages += self.ledger.free - before + len(pages)
        self.tree.loaded(adapter)
        totals.adapter_loads += 1
        totals.h2d_bytes += nbytes
        service.copy += self.rates.h2d(nbytes)

    def _promote(self, on_device: int, on_host: int, service: _Service) -> int:
        """Tokens known after the cheaper of copy and forward was chosen for what the host has."""
        if on_host <= on_device:
            return on_device
        nbytes = (on_host - on_device) * self.trace.sizes.kv_bytes_per_token
        seconds = self.rates.h2d(nbytes)
        if seconds >= self.rates.prefill(on_host - on_device, on_device):
            return on_device
        self.totals.h2d_bytes += nbytes
        service.copy += seconds
        return on_host

    def _keep(
        self, index: int, adapter: AdapterNode, held: Node, tokens: array[int], on_device: int
    ) -> None:
        """Pages for the whole request; the prompt goes to the tree as after a prefill."""
        demand, tree = self.trace.demands[index], self.tree
        size = tree.page_tokens
        wanted = demand.pages - on_device // size
        self.totals.evicted_pages += max(0, tree.evict(wanted - self.ledger.free))
        pages = self.ledger.take(wanted, Owner.KV_RUNNING)
        assert pages is not None, f"no room for request {index}: the schedule is wrong"
        aligned = demand.prompt // size * size
        handed = (aligned - on_device) // size
        done = tree.insert(self._space(adapter), tokens[:aligned], pages[:handed], start=on_device)
        tree.lock(done.node)
        tree.unlock(held)
        self._running[index] = _Running(done.node, adapter, tokens, aligned, pages[handed:])
        self._commit(adapter, tokens[:aligned])

    def _end(self, index: int) -> None:
        running = self._running.pop(index)
        size = self.tree.page_tokens
        aligned = len(running.tokens) // size * size
        handed = (aligned - running.locked) // size
        tokens, pages = running.tokens[:aligned], running.pages
        space = self._space(running.adapter)
        self.tree.insert(space, tokens, pages[:handed], start=running.locked)
        self.ledger.give(pages[handed:], Owner.KV_RUNNING)
        self._commit(running.adapter, tokens)
        self.tree.unlock(running.node)
        self.tree.unlock(running.adapter)

    def _commit(self, adapter: AdapterNode, tokens: array[int]) -> None:
        """Write KV through to the host, and the image if the host lost it: its price falls."""
        assert adapter.identity is not None, "the base model has no image"
        self.host.commit(adapter.identity, tokens)
        self.tree.revalue(adapter)

    def _count(self, demand: Demand, on_device: int, known: int, service: _Service) -> None:
        totals = self.totals
        totals.requests += 1
        totals.prompt_tokens += demand.prompt
        totals.device_tokens += on_device
        totals.host_tokens += known - on_device
        totals.prefill_seconds += service.prefill
        totals.h2d_seconds += service.copy
        totals.disk_seconds += service.disk

    def _time(self, index: int, service: _Service) -> None:
        """One more request through disk, link and device."""
        ready = self.plan.ready_s[index]
        start = ready if self.prefetch else max(ready, self._free_at)
        read = start
        if service.disk:
            read = self._disk_at = max(start, self._disk_at) + service.disk
        copied = read
        if service.copy:
            copied = self._link_at = max(read, self._link_at) + service.copy
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
