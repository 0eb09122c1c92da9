"""Measure what is missing: one server for each peer and budget, one unit after the other on it.

Servers may start at the same time; they are measured one after the other all the same."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import httpx

from sglang_graft.bench import gate
from sglang_graft.bench.budget import Split, split
from sglang_graft.bench.client import HttpClient
from sglang_graft.bench.clock import RealClock
from sglang_graft.bench.figures import columns, figures, moved
from sglang_graft.bench.make_adapters import make_adapters
from sglang_graft.bench.peers import Peer
from sglang_graft.bench.play import Player, Record
from sglang_graft.bench.samples import (
    REPORT_S,
    Sample,
    Sampler,
    StockSizes,
    graft_sample,
    stock_report,
    stock_sample,
)
from sglang_graft.bench.server import Running, ServerError, Settings, Start, serving
from sglang_graft.bench.units import Load, Results, Unit, write_json
from sglang_graft.bench.warm import Warmer, flush
from sglang_graft.sim.workloads import Workload

# Without a limit of its own a connection would wait for a free one, and TTFT with it.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2)
_ANSWER_S = 3600.0
# What a start and a warm-up are taken to need before the first ones are known.
_FIRST_START_S, _FIRST_WARM_S = 30.0, 30.0


class Progress(Protocol):
    """Told what happens; shows it as it likes."""

    def say(self, text: str) -> None:
        """A line about what begins or has ended."""

    def requests(self, done: int, planned: int, last: Record) -> None:
        """A request of the unit that is measured has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to measure: every peer with every load at every budget.

    drain_s: how long after the last first turn answers are waited for; distinct: weight files of
    one rank.
    """

    peers: Sequence[Peer]
    loads: Sequence[Load]
    budgets_gb: Sequence[float]
    drain_s: float = 60.0
    sample_s: float = 2.0
    distinct: int | None = None

    def units(self) -> Iterator[Unit]:
        """All of them; those that share a server are neighbours."""
        for budget in self.budgets_gb:
            for peer in self.peers:
                for load in self.loads:
                    yield Unit(peer=peer, load=load, budget_gb=budget)


@dataclass(slots=True)
class Bench:
    """Runs plans whose servers may start together.

    about: machine and versions, kept in every result; start_together: how many servers start at
    the same time, so that one long start is paid for all of them (None: all); stop_after_s: no
    unit begins that could run past it (a call on a borrowed machine has an end), counted from
    `started`, a monotonic time.
    """

    plans: Sequence[Plan]
    results: Results
    settings: Settings
    work: Path
    about: dict[str, Any]
    progress: Progress
    start_together: int | None = 1
    stop_after_s: float | None = None
    retry_failed: bool = False
    started: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        """Measure; returns how many units are left because of `stop_after_s`."""
        every = {unit: plan for plan in self.plans for unit in plan.units()}
        self.results.ask(every)
        missing = [unit for unit in every if not self._is_done(unit)]
        self.progress.say(
            f"{len(every) - len(missing)} of {len(every)} units are there, {len(missing)} to go"
        )
        left = len(missing)
        groups = []
        for _, same in groupby(missing, key=lambda unit: (every[unit], unit.budget_gb, unit.peer)):
            units = list(same)
            group = _Group.of(every[units[0]], units, self.settings)
            if group.cut.problem:
                left -= self._refuse(group.units, group.cut, "infeasible", group.cut.problem)
            else:
                groups.append(group)
        together = self.start_together or max(len(groups), 1)
        for place in range(0, len(groups), together):
            lot = groups[place : place + together]
            before_s = self._usual_start(len(lot)) + self._usual_warm()
            if not self._time_for(lot[0], lot[0].first, before_s):
                break
            left -= self._measure(lot)
        return left

    def _is_done(self, unit: Unit) -> bool:
        if not self.results.finished(unit):
            return False
        return not (self.retry_failed and self.results.status(unit) == "failed")

    def _measure(self, lot: Sequence[_Group]) -> int:
        """Groups whose servers start together; returns how many units are done then.

        Those that are not measured are paused: an idle server keeps a core busy, and on an H200
        whoever had one beside it was slower.
        """
        starts = [self._start(group) for group in lot]
        done = 0
        with serving(starts, self.settings) as servers:
            for server in servers:
                if isinstance(server, Running):
                    server.launched.pause()
            for place, (group, server) in enumerate(zip(lot, servers, strict=True)):
                beside = sum(isinstance(later, Running) for later in servers[place + 1 :])
                company = {"started_together": len(lot), "beside": beside, "paused": True}
                if isinstance(server, Running):
                    server.launched.resume()
                done += self._measure_group(group, server, company)
        return done

    def _start(self, group: _Group) -> Start:
        """Make its adapters; what its server is started with."""
        peer, cut, load = group.first.peer, group.cut, group.first.load
        adapters = make_adapters(
            self.work / "adapters" / load.name,
            group.workload.adapters,
            self.settings.shape,
            seed=0,
            distinct=group.plan.distinct,
        )
        self.progress.say(f"starting {peer.label}, {group.first.budget_gb:g} GB: {cut.arithmetic}")
        return Start(peer, cut, adapters, self.work / "logs" / f"{group.first.key}.log")

    def _measure_group(
        self, group: _Group, server: Running | ServerError, company: dict[str, int]
    ) -> int:
        """Units that share a server, which ends with them; returns how many are done then."""
        if isinstance(server, ServerError):
            return self._refuse(group.units, group.cut, "failed", str(server), company)
        try:
            self.progress.say(f"{group.first.peer.label} answered after {server.start_s:.0f} s")
            if not self._time_for(group, group.first, self._usual_warm()):
                return 0
            return asyncio.run(_Side(self, server, group, company).measure())
        except (RuntimeError, httpx.HTTPError) as error:  # the second: the server went away
            text = str(error) or repr(error)
            units = group.units
            missing = [unit for unit in units if not self.results.finished(unit)]
            refused = self._refuse(missing, group.cut, "failed", text, company)
            return refused + len(units) - len(missing)
        finally:
            server.launched.end()

    def _refuse(
        self,
        units: Sequence[Unit],
        cut: Split,
        status: str,
        why: str,
        company: dict[str, int] | None = None,
    ) -> int:
        for unit in units:
            self.progress.say(f"{unit.key}: {status}: {why.splitlines()[0]}")
            result = {"status": status, "why": why, "split": cut.report(), "about": self.about}
            self.results.write(unit, result | (company or {}))
        return len(units)

    def _usual_start(self, together: int) -> float:
        """Seconds that a start took at most so far, of those of as many servers if there are."""
        known = [r for r in self.results.read_all() if "start_s" in r]
        alike = [r for r in known if r.get("started_together", 1) == together] or known
        return max((r["start_s"] for r in alike), default=_FIRST_START_S)

    def _usual_warm(self) -> float:
        """Seconds from a server's first answer to its first unit, at most so far."""
        known = [r["warm"]["seconds"] for r in self.results.read_all() if "start_s" in r]
        # The gate and the calibration take about as long as the rest of the warm-up.
        return max((2 * seconds for seconds in known), default=_FIRST_WARM_S)

    def _time_for(self, group: _Group, unit: Unit, before_s: float = 0.0) -> bool:
        """Whether the unit ends in time when it begins in `before_s` seconds."""
        if self.stop_after_s is None:
            return True
        needed = before_s + unit.load.seconds + group.plan.drain_s
        fits = time.monotonic() - self.started + needed <= self.stop_after_s
        if not fits:
            self.progress.say(f"no time for {unit.key}, which may take {needed:.0f} s")
        return fits


@dataclass(frozen=True, slots=True)
class _Group:
    """Units that share a server. `workload`: of the first one; all have the same adapters."""

    plan: Plan
    units: list[Unit]
    cut: Split
    workload: Workload

    @classmethod
    def of(cls, plan: Plan, units: list[Unit], settings: Settings) -> _Group:
        """With its share of the budget computed."""
        first = units[0]
        workload = first.load.workload()
        cut = split(first.peer, first.budget_gb, settings.shape, workload)
        return cls(plan, units, cut, workload)

    @property
    def first(self) -> Unit:
        """Names the server's log and its gate."""
        return self.units[0]


@dataclass(slots=True)
class _Side:
    """A running server and what is measured on it. `company`: what stood beside it, for results."""

    bench: Bench
    server: Running
    group: _Group
    company: dict[str, int]
    host_bytes: int = 0

    async def measure(self) -> int:
        """Check, warm, ask the gate's questions, then every unit; returns how many were done."""
        units, first = self.group.units, self.group.first
        client = httpx.AsyncClient(base_url=self.server.url, limits=_LIMITS, timeout=_ANSWER_S)
        async with client:
            await self._check(client, first.peer)
            warm = await self._prepare(client, first)
            for done, unit in enumerate(units):
                if not self.bench._time_for(self.group, unit):
                    return done
                await flush(client)
                result = await self._unit(client, unit)
                result |= {"warm": warm, "start_s": self.server.start_s, **self.company}
                self.bench.results.write(unit, result)
                ttft = result["figures"]["ttft_ms"]["mean"]
                self.bench.progress.say(f"{unit.key}: mean TTFT {ttft:.0f} ms")
        return len(units)

    async def _check(self, client: httpx.AsyncClient, peer: Peer) -> None:
        """The server must hold what was computed for it, no more and no less."""
        info = (await client.get("/server_info", timeout=REPORT_S)).json()
        got, wanted = info["max_total_num_tokens"], self.group.cut.kv_tokens
        if got != wanted:
            raise RuntimeError(
                f"{peer.label}: wanted {wanted} tokens of KV, the server has {got}:"
                " raise --mem-fraction-static in --server-args, or lower --budget-gb"
            )
        if peer.engine == "graft":
            report = (await client.get("/graft/pool", timeout=REPORT_S)).json()
            held = report["pages"]["total"] * report["page_bytes"]
            self.host_bytes = report["host"]["pages"]["total"] * report["page_bytes"]
            if held > self.group.cut.budget_bytes:
                raise RuntimeError(f"{peer.label}: the pool has {held} bytes, more than the budget")
        else:
            stock_report(info)

    async def _prepare(self, client: httpx.AsyncClient, first: Unit) -> dict[str, Any]:
        """Warm-up and gate, within the time that a start may take: no unit's end bounds these."""
        limit_s = self.bench.settings.start_limit_s
        try:
            async with asyncio.timeout(limit_s):
                warm = await self._warm(client, first.peer)
                await self._gate(client, first)
        except TimeoutError:
            raise RuntimeError(
                f"{first.peer.label}: the warm-up had not ended after {limit_s:g} s"
            ) from None
        return warm

    async def _warm(self, client: httpx.AsyncClient, peer: Peer) -> dict[str, Any]:
        self.bench.progress.say(f"warming {peer.label}")
        clock = RealClock()

        async def empty() -> None:
            await flush(client)

        warmer = Warmer(
            HttpClient(client, clock),
            self.group.workload,
            self.bench.settings.shape.vocabulary,
            peer.base_traffic,
            empty,
            clock.now,
        )
        return await warmer.warm()

    async def _gate(self, client: httpx.AsyncClient, unit: Unit) -> None:
        shape, workload = self.bench.settings.shape, self.group.workload
        answers = await gate.ask(client, workload, shape.vocabulary, unit.peer.base_traffic)
        itself = gate.compare(answers["alone"], answers["at_once"], shape.dtype_name)
        name = f"{unit.load.name}-{unit.budget_gb:g}gb-{unit.peer.slug}.json"
        found: dict[str, Any] = {
            "peer": asdict(unit.peer),
            "workload": unit.load.name,
            "dtype": shape.dtype_name,
        }
        found |= {"budget_gb": unit.budget_gb, "itself": itself, **answers}
        write_json(self.bench.results.folder / "gates" / name, found)

    async def _unit(self, client: httpx.AsyncClient, unit: Unit) -> dict[str, Any]:
        workload = unit.load.workload()
        clock = RealClock()
        player = Player(
            workload,
            HttpClient(client, clock),
            clock,
            self.bench.settings.shape.vocabulary,
            base_traffic=unit.peer.base_traffic,
        )
        planned = len(workload.requests)
        player.done = lambda record: self.bench.progress.requests(
            len(player.records), planned, record
        )
        sampler = self._sampler(client, unit.peer, workload)
        gc.freeze()  # a walk over all that is there already makes the client 0.1 to 0.2 s late
        host = [await _host_report(client, unit.peer)]
        task = asyncio.create_task(sampler.run())
        records = await player.play(unit.load.seconds + self.group.plan.drain_s)
        await sampler.stop(task)
        host.append(await _host_report(client, unit.peer))
        return {
            "status": "measured",
            "about": self.bench.about,
            "command": without_paths(self.server.line),
            "split": self.group.cut.report(),
            "sizes": asdict(self.bench.settings.shape.sizes),
            "host_bytes": self.host_bytes,
            "drain_s": self.group.plan.drain_s,
            "adapters": [[adapter.name, adapter.rank] for adapter in workload.adapters],
            "figures": figures(records, planned),
            "moved": moved(sampler.samples),
            "host_before_and_after": host,
            "samples": sampler.columns(),
            "samples_missed": sampler.missed,
            "records": columns(records),
        }

    def _sampler(self, client: httpx.AsyncClient, peer: Peer, workload: Workload) -> Sampler:
        shape, clock = self.bench.settings.shape, RealClock()
        period = self.group.plan.sample_s
        if peer.engine == "graft":
            return Sampler(client, "/graft/pool", graft_sample, clock, period)
        per_rank = shape.adapter_bytes_per_rank
        sizes = StockSizes(
            shape.kv_bytes_per_token,
            max(adapter.rank for adapter in workload.adapters) * per_rank,
            {adapter.name: adapter.rank * per_rank for adapter in workload.adapters},
        )

        def read(info: Any, at_s: float) -> Sample:
            return stock_sample(stock_report(info), at_s, sizes)

        return Sampler(client, "/server_info", read, clock, period)


async def _host_report(client: httpx.AsyncClient, peer: Peer) -> Any:
    """The counters of Graft's tiers, since its start; None of others."""
    if peer.engine != "graft":
        return None
    return (await client.get("/graft/pool", timeout=REPORT_S)).json()["host"]


def without_paths(line: Sequence[str]) -> list[str]:
    """The command as others can run it: no folders of this machine, no adapter one by one."""
    kept = list(line[: line.index("--lora-paths") + 1] if "--lora-paths" in line else line)
    place = kept.index("--model-path") + 1
    return ["python", *kept[1:place], "MODEL", *kept[place + 1 :]]
