"""What a server holds, sampled while it serves: pages by owner, invalid KV, loads, bytes moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from sglang_graft.bench.clock import Clock

STOCK_PROBE_ENV = "GRAFT_STOCK_PROBE"
"""Makes a server without Graft report what it holds: see `engine/stock_probe`."""
_STOCK_KEY = "graft_stock_probe"
REPORT_S = 30.0
"""A report that takes longer is missed: a server that hangs must not hold up what follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Bytes by owner at one moment, and counts since the server's start; None: not reported.

    adapter: of a static split, what its slots reserve, used or not.
    """

    at_s: float
    budget: int
    adapter: int
    kv_cached: int
    kv_running: int
    kv_invalid: int
    free: int
    loads: int
    evictions: int
    bytes_to_device: int
    bytes_to_host: int | None = None
    disk_reads: int | None = None
    passes_waited: int | None = None
    probe_s: float | None = None

    @property
    def used(self) -> int:
        """Bytes that hold something that can be used: invalid KV cannot."""
        return self.adapter + self.kv_cached + self.kv_running - self.kv_invalid


def graft_sample(report: Mapping[str, Any], at_s: float) -> Sample:
    """From `/graft/pool`."""
    pages, page, host = report["pages"], report["page_bytes"], report["host"]
    return Sample(
        at_s=at_s,
        budget=pages["total"] * page,
        adapter=(pages["adapter"] + pages["in_flight"]) * page,
        kv_cached=pages["kv_cached"] * page,
        kv_running=pages["kv_running"] * page,
        kv_invalid=report["invalid_kv_pages"] * page,
        free=pages["free"] * page,
        loads=host["loads"],
        evictions=host["evictions"],
        bytes_to_device=host["pages_to_device"] * page,
        bytes_to_host=host["pages_to_host"] * page,
        disk_reads=host["disk_reads"],
        passes_waited=host["passes_waited"],
    )


@dataclass(frozen=True, slots=True)
class StockSizes:
    """What a probe's tokens and loads are in bytes. weights: of each adapter, by name."""

    token_bytes: int
    slot_bytes: int
    weights: Mapping[str, int]


def stock_sample(report: Mapping[str, Any], at_s: float, sizes: StockSizes) -> Sample:
    """From the probe in `/server_info`. Copies to the device are counted at true ranks."""
    token, total = sizes.token_bytes, report["tokens_total"]
    cached, free = report["tokens_cached"], report["tokens_free"]
    slots = report["slots_total"] * sizes.slot_bytes
    return Sample(
        at_s=at_s,
        budget=total * token + slots,
        adapter=slots,
        kv_cached=cached * token,
        kv_running=max(total - free - cached, 0) * token,
        kv_invalid=report["tokens_invalid"] * token,
        free=free * token,
        loads=sum(report["loads"].values()),
        evictions=report["evictions"],
        bytes_to_device=sum(sizes.weights[name] * n for name, n in report["loads"].items()),
        probe_s=report["seconds"],
    )


@dataclass(slots=True)
class Sampler:
    """Asks a server every `period_s`. `read` makes a sample of the server's report."""

    client: httpx.AsyncClient
    path: str
    read: Callable[[Any, float], Sample]
    clock: Clock
    period_s: float
    samples: list[Sample] = field(default_factory=list)
    missed: int = 0
    """Times that the server did not answer in good time."""
    _start: float = 0.0

    async def once(self) -> None:
        """Take one sample now."""
        try:
            response = await self.client.get(self.path, timeout=REPORT_S)
            response.raise_for_status()
        except httpx.HTTPError:
            self.missed += 1
            return
        self.samples.append(self.read(response.json(), self.clock.now() - self._start))

    async def run(self) -> None:
        """Sample until cancelled; time counts from here."""
        self._start = self.clock.now()
        turn = 0
        while True:
            await self.once()
            turn += 1
            await self.clock.sleep_until(self._start + turn * self.period_s)

    async def stop(self, task: asyncio.Task[None]) -> None:
        """End `run`, and take a last sample."""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self.once()

    def columns(self) -> dict[str, list[Any]]:
        """The samples as columns, for the file."""
        rows = [asdict(sample) for sample in self.samples]
        return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def stock_report(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """The probe in `/server_info`. RuntimeError when the server has none."""
    state: Mapping[str, Any] = info["internal_states"][0]
    if _STOCK_KEY not in state:
        raise RuntimeError(
            f"the server shows no {_STOCK_KEY}: wanted {STOCK_PROBE_ENV}=1 in its environment and"
            " the sglang-graft package beside it"
        )
    probe: Mapping[str, Any] = state[_STOCK_KEY]
    return probe
