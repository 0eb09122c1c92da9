"""Many replicas and very many adapters: what routing by adapter is worth.

Coarser than `replay`, so that 10^5 adapters on 100 replicas take seconds. Each request is one turn
below its adapter's system prompt. An adapter's weights and the KV of its system prompt are one
object, kept least-recently-used on each replica's device and host. Reads take turns on a replica's
disk, copies on its link, prefills on its device; a prefill never waits for another request's copy
(the server passes over requests whose bytes are on their way). Decode runs beside all that. What is
left out: KV of answers, pages that running requests hold, and requests that share one load.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sglang_graft.cache.rates import Rates
from sglang_graft.sim.routing import router
from sglang_graft.sim.sizes import Sizes
from sglang_graft.sim.workloads import zipf

_RANKS = (8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLoad:
    """Requests come as a Poisson process of `rate` in a second over all replicas, adapters under
    Zipf's law. The first `warm_share` of the requests fills caches and is not counted."""

    adapters: int = 100_000
    replicas: int = 100
    requests: int = 1_000_000
    rate: float = 1000.0
    exponent: float = 1.0
    system: int = 512
    asked: int = 256
    answered: int = 64
    device_gb: float = 24.0
    host_gb: float = 128.0
    warm_share: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("adapters", "replicas", "requests", "rate", "device_gb"):
            if not getattr(self, name) > 0:
                raise ValueError(f"FleetLoad.{name}: wanted more than 0, got {getattr(self, name)}")


class _Bytes:
    """Objects of an adapter each, the least recently used leaving first."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: OrderedDict[int, int] = OrderedDict()
        self._used = 0

    def use(self, adapter: int, nbytes: int) -> bool:
        """Whether it was there; it is afterwards (unless it is larger than everything)."""
        if adapter in self._held:
            self._held.move_to_end(adapter)
            return True
        if nbytes > self._room:
            return False
        self._held[adapter] = nbytes
        self._used += nbytes
        while self._used > self._room:
            self._used -= self._held.popitem(last=False)[1]
        return False


@dataclass(slots=True)
class _Replica:
    device: _Bytes
    host: _Bytes
    free_at: float = 0.0
    link_at: float = 0.0
    disk_at: float = 0.0
    ends: list[float] = field(default_factory=list)
    served: int = 0


@dataclass(slots=True)
class Fleet:
    """One run of `load` under one routing."""

    load: FleetLoad
    routing: str
    sizes: Sizes = field(default_factory=Sizes)
    rates: Rates = field(default_factory=Rates)
    decode_s_per_token: float = 0.012

    def run(self) -> dict[str, Any]:
        """Shares of requests by where their adapter was, bytes, TTFT, balance."""
        load = self.load
        source = np.random.default_rng(load.seed)
        share = zipf(load.adapters, load.exponent)
        asked = np.searchsorted(share, source.random(load.requests)).clip(max=load.adapters - 1)
        places = source.permutation(load.adapters)  # popularity has nothing to do with rank
        adapters = places[asked].tolist()
        times = np.cumsum(source.exponential(1 / load.rate, load.requests)).tolist()
        room = (int(load.device_gb * 1e9), int(load.host_gb * 1e9))
        replicas = [_Replica(_Bytes(room[0]), _Bytes(room[1])) for _ in range(load.replicas)]
        choose = router(
            self.routing, replicas=load.replicas, adapters=load.adapters, seed=load.seed
        )
        counted = int(load.requests * load.warm_share)
        loads, total = [0] * load.replicas, 0
        due: list[tuple[float, int]] = []
        ttft: list[float] = []
        found = {"device": 0, "host": 0, "disk": 0}
        for index, (now, adapter) in enumerate(zip(times, adapters, strict=True)):
            while due and due[0][0] <= now:
                loads[heapq.heappop(due)[1]] -= 1
                total -= 1
            chosen = choose(adapter, loads, total)
            where, first = self._serve(replicas[chosen], adapter, now)
            loads[chosen] += 1
            total += 1
            heapq.heappush(due, (first + load.answered * self.decode_s_per_token, chosen))
            if index >= counted:
                replicas[chosen].served += 1
                found[where] += 1
                ttft.append(first - now)
        return self._summary(ttft, found, [replica.served for replica in replicas])

    def _serve(self, replica: _Replica, adapter: int, now: float) -> tuple[str, float]:
        """Where the adapter was, and when the first token comes."""
        load, rates = self.load, self.rates
        weights = _RANKS[adapter % len(_RANKS)] * self.sizes.adapter_bytes_per_rank
        prefix = load.system * self.sizes.kv_bytes_per_token
        on_device = replica.device.use(adapter, weights + prefix)
        on_host = replica.host.use(adapter, weights + prefix)
        ready, known, where = now, load.system, "device"
        if not on_device and on_host:
            ready = replica.link_at = max(now, replica.link_at) + rates.load_seconds(
                weights + prefix
            )
            where = "host"
        elif not on_device:
            replica.disk_at = max(now, replica.disk_at) + rates.read_seconds(weights)
            ready = replica.link_at = max(replica.disk_at, replica.link_at) + rates.load_seconds(
                weights
            )
            known, where = 0, "disk"
        prefill = rates.prefill_seconds(load.system + load.asked - known, known)
        replica.free_at = max(now, replica.free_at) + prefill
        return where, max(replica.free_at, ready + prefill)

    def _summary(
        self, ttft: list[float], found: dict[str, int], served: list[int]
    ) -> dict[str, Any]:
        count = len(ttft)
        p50, p99 = np.percentile(ttft, (50, 99)).tolist()
        return {
            "routing": self.routing,
            "load": asdict(self.load),
            "requests": count,
            **{f"{where}_share": number / count for where, number in found.items()},
            "ttft_mean_s": float(np.mean(ttft)),
            "ttft_p50_s": p50,
            "ttft_p99_s": p99,
            "busiest_over_mean": max(served) * len(served) / count,
        }
