"""A Graft server of real size under all workloads at once, for as long as a run allows.

    python benchmark/serving/bench_soak.py --model MODEL --json OUT --work-dir DIR \
        [--seconds 480] [--budget-gb 12] [--server-args="--attention-backend flashinfer"]

The protocol's workloads at low rates, mixed. Beside them, until the end: the same questions again
and again (canaries), whose answers must stay those of the beginning; adapters that are loaded,
asked, replaced and unloaded; bad input, which must be refused; clients that leave amid a stream,
and aborts; each second the pool's own report, which must add up, and memory. Afterwards nothing may
be left, and the canaries are asked once more. OUT is one JSON object, kept up to date every half
minute (`partial`). Exit code 1 when there are `problems`.

The checks of all invariants after each change (`--strict`) are off unless asked for: one walk takes
3 ms on a tree of 6000 pages, and there are several in a step that takes 6 to 9 ms on a GPU, so what
is soaked would be another server. The pool's counters, SGLang's leak check whenever the server is
idle and the checks at the end are always there.

What this does not show: answers against another implementation (test/integration/soak.py compares
with PEFT); a trained model; hours.
"""

import argparse
import asyncio
import shlex
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sglang_graft.bench import soak
from sglang_graft.bench.budget import split
from sglang_graft.bench.client import HttpClient
from sglang_graft.bench.clock import RealClock
from sglang_graft.bench.figures import moved, spread
from sglang_graft.bench.machine import machine, versions
from sglang_graft.bench.make_adapters import make_adapters
from sglang_graft.bench.peers import parse_peers
from sglang_graft.bench.play import Player, Record
from sglang_graft.bench.process import tail
from sglang_graft.bench.run import without_paths
from sglang_graft.bench.server import Running, ServerError, Settings, Start, serving
from sglang_graft.bench.shape import ModelShape
from sglang_graft.bench.soak_actors import ANSWER_S, Canaries, Controller, Leavers, Soak, Watch
from sglang_graft.bench.units import Load, write_json
from sglang_graft.bench.warm import flush
from sglang_graft.sim.workloads import AdapterSpec, Workload, merge

# First turns a second and adapters: together busy, not too much, for an 8B shape on an H200.
LOADS = {
    "chat": (1.0, 32),
    "translation": (1.0, 24),
    "agents": (0.5, 10),
    "swing": (4.0, 32),
    "many": (1.0, 128),
    "uniform-cold": (1.0, 16),
}
DISTINCT = 2
"""Weight files of a rank; further adapters are links to them with a scale of their own."""
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
JUDGED = ("scheduler", "http", "gpu")
SHOWN = 20
SILENT_S = 300.0
"""A request of the traffic that gets nothing for so long has failed."""
WRITE_S, SETTLE_S = 30.0, 60.0
SERIES = 10
"""Of so many samples of memory one is in the result."""
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2)


@dataclass(slots=True)
class Plan:
    """The traffic, the adapters and how the server is started. owners: the workload of each adapter
    of `workload`; folders: of these and of `spare`, adapters without a name at the start."""

    options: argparse.Namespace
    shape: ModelShape
    workload: Workload
    owners: list[str]
    spare: tuple[AdapterSpec, ...]
    folders: dict[str, Path]

    @classmethod
    def make(cls, options: argparse.Namespace) -> "Plan":
        """Write the adapters. ValueError for what cannot be served."""
        shape = ModelShape.read(options.model, options.device)
        parts = [load.workload() for load in loads(options)]
        workload = merge(parts)
        ranks = sorted({spec.rank for spec in workload.adapters})
        spare = tuple(AdapterSpec(f"spare-{rank}", rank) for rank in ranks)
        owners = [part.name for part in parts for _ in part.adapters]
        home, specs = options.work_dir / "adapters", (*workload.adapters, *spare)
        folders = make_adapters(home, specs, shape, seed=0, distinct=DISTINCT)
        return cls(options, shape, workload, owners, spare, folders)

    def start(self) -> tuple[Start, Settings]:
        """For one server with all adapters but the spare ones. ValueError: the budget is small."""
        options = self.options
        (peer,) = parse_peers(["graft:cost"])
        cut = split(peer, options.budget_gb, self.shape, self.workload)
        if cut.problem:
            raise ValueError(f"--budget-gb: {cut.problem}")
        graft = [*shlex.split(options.graft_args), *(["--graft-check"] if options.strict else [])]
        settings = Settings(
            model=options.model.resolve(),
            shape=self.shape,
            device=options.device,
            more={"all": shlex.split(options.server_args), "graft": graft},
            env=STRICT if options.strict else {},
            start_limit_s=options.start_limit,
        )
        named = {spec.name: self.folders[spec.name] for spec in self.workload.adapters}
        return Start(peer, cut, named, self.log), settings

    @property
    def log(self) -> Path:
        """Of the server."""
        return Path(self.options.work_dir, "logs", "soak.log")

    def known(self) -> dict[str, Path]:
        """Two adapters of each rank that have a name from the start on."""
        by_rank: dict[int, list[str]] = {}
        for spec in self.workload.adapters:
            by_rank.setdefault(spec.rank, []).append(spec.name)
        return {name: self.folders[name] for names in by_rank.values() for name in names[:2]}


def loads(options: argparse.Namespace) -> list[Load]:
    """The traffic's parts. ValueError for a name that is none."""
    names = options.workloads.split(",")
    if unknown := [name for name in names if name not in LOADS]:
        raise ValueError(f"--workloads: wanted some of {', '.join(LOADS)}; got {unknown}")
    return [
        Load(
            name=name,
            rate=LOADS[name][0] * options.rate_scale,
            seconds=options.seconds,
            adapters=min(LOADS[name][1], options.adapters),
            seed=options.seed,
        )
        for name in names
    ]


@dataclass(slots=True)
class Run:
    """One soak of a server that runs."""

    plan: Plan
    server: Running
    about: dict[str, Any]
    soak: Soak = field(init=False)
    player: Player = field(init=False)
    canaries: Canaries = field(init=False)
    controller: Controller = field(init=False)
    watch: Watch = field(init=False)
    left: dict[str, Any] = field(default_factory=dict)
    logged: int = 0
    """Characters of the server's log before the traffic."""

    @property
    def seconds(self) -> float:
        """How long the traffic goes on."""
        found: float = self.plan.options.seconds
        return found

    async def run(self) -> bool:
        """All of it; whether there were no problems."""
        url = self.server.url
        client = httpx.AsyncClient(base_url=url, limits=LIMITS, timeout=ANSWER_S)
        traffic = httpx.AsyncClient(base_url=url, limits=LIMITS, timeout=SILENT_S)
        async with client, traffic:
            self._parts(client, traffic)
            try:
                before = await self._before()
                await self._traffic()
                await self._end(before)
            except (httpx.HTTPError, RuntimeError) as error:
                self.soak.problem(f"before or after the traffic: {error!r}")
        self._log_and_memory()
        return not self.write(partial=False)

    def _parts(self, client: httpx.AsyncClient, traffic: httpx.AsyncClient) -> None:
        plan, options = self.plan, self.plan.options
        given = (plan.workload, plan.shape, self.seconds, options.work_dir, options.seed)
        self.soak = Soak(client, *given, say=say)
        clock = RealClock()
        send = HttpClient(traffic, clock)
        self.player = Player(plan.workload, send, clock, plan.shape.vocabulary)
        self.canaries = Canaries(self.soak)
        spare = {spec.name: plan.folders[spec.name] for spec in plan.spare}
        self.controller = Controller(self.soak, plan.known(), spare)
        self.watch = Watch(self.soak, self.server, options.device)

    async def _before(self) -> dict[str, Any]:
        """The answers that all later ones must be; the pool's report once it is empty again."""
        await flush(self.soak.client)
        await self.canaries.start()
        await self.controller.start()
        await flush(self.soak.client)
        self.logged = len(self.plan.log.read_text(errors="replace"))
        self.soak.done.clear()
        self.soak.times.clear()
        say(f"canaries and folders answered after {self.soak.now():.0f} s; the soak begins")
        self.write(partial=True)
        report: dict[str, Any] = await self.soak.get("/graft/pool")
        got, wanted = report["pages"]["total"] * report["page_tokens"], self.about["split"]
        if got != wanted["kv_tokens"]:
            self.soak.problem(f"wanted a pool of {wanted['kv_tokens']} tokens, it has {got}")
        return report

    async def _traffic(self) -> None:
        """Everything at once, until the end or until the server has ended."""
        leavers = Leavers(self.soak)
        self.soak.begin = time.perf_counter()
        play = asyncio.create_task(self.player.play(self.seconds))
        gone = asyncio.create_task(self.soak.gone.wait())
        parts = (self.canaries, self.controller, leavers, self.watch)
        others = [asyncio.create_task(part.run()) for part in parts]
        write = asyncio.create_task(self._keep())
        await asyncio.wait([play, gone], return_when=asyncio.FIRST_COMPLETED)
        left = max(self.seconds - self.soak.now(), 0) + ANSWER_S
        await asyncio.wait(others, timeout=left)
        # An operation of a part may hang, and a bug in one must not cost the others' figures.
        for task in (play, gone, write, *others):
            late = not task.done() and task in others
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if late or isinstance(result, Exception):
                self.soak.problem(f"a part of the soak {'went on' if late else repr(result)}")

    async def _keep(self) -> None:
        """Leave figures even if the run is cut."""
        while True:
            await asyncio.sleep(WRITE_S)
            self.write(partial=True)
            found = soak.errors(self._records(), self.plan.owners)[0]
            others = len(self.soak.problems)
            say(f"{self.soak.now():.0f} s: {dict(found)}, {others} other problems")

    async def _end(self, before: dict[str, Any]) -> None:
        """Nothing may be left of anything."""
        if self.soak.gone.is_set():
            return
        await self._settle()
        named = {row["name"] for row in before["adapters"]}
        for row in (await self.soak.get("/graft/pool"))["adapters"]:
            if row["name"] not in named:
                body = {"lora_name": row["name"]}
                (await self.soak.post("unload", "/unload_lora_adapter", body)).raise_for_status()
        await flush(self.soak.client)
        pool = await self.soak.get("/graft/pool")
        requests = await self.soak.get("/graft/requests")
        for text in soak.left_over(before, pool, requests):
            self.soak.problem(f"at the end: {text}")
        keys = ("pages", "adapter_host_bytes")
        self.left = {
            "start": {key: before[key] for key in keys} | {"host_pages": before["host"]["pages"]},
            "end": {key: pool[key] for key in keys} | {"host_pages": pool["host"]["pages"]},
        }
        await self.canaries.round("at the end")
        await self.controller.judge()

    async def _settle(self) -> None:
        """Wait until no request and no copy is left anywhere. RuntimeError when some stay."""
        deadline = time.perf_counter() + SETTLE_S
        while True:
            requests = await self.soak.get("/graft/requests")
            pool = await self.soak.get("/graft/pool")
            left = {name: pool["pages"][name] for name in ("kv_running", "in_flight")}
            left |= {name: pool["host"][name] for name in ("pages_loading", "pages_storing")}
            left |= {"requests": requests["total"], "retired": len(requests["retired"])}
            if not any(left.values()):
                return
            if time.perf_counter() > deadline:
                raise RuntimeError(f"after {SETTLE_S:g} s there were {left}")
            await asyncio.sleep(0.2)

    def _log_and_memory(self) -> None:
        if self.soak.gone.is_set():
            say(tail(self.plan.log))
        for text in soak.tracebacks(self.plan.log.read_text(errors="replace")[self.logged :]):
            self.soak.problem(f"a traceback in the server's log: {text}")
        found = soak.growth(self.watch.memory, self.seconds)
        for text in soak.grown(found, JUDGED, self.seconds):
            self.soak.problem(text)

    def _records(self) -> list[Record]:
        """Those that have ended."""
        return [record for record in self.player.records if record.end_s]

    def write(self, partial: bool) -> int:
        """The result so far; how many problems it has."""
        records, owners = self._records(), self.plan.owners
        counts, failed = soak.errors(records, owners)
        problems = [*self.soak.problems, *self.controller.doubts.problems(), *failed]
        memory = self.watch.memory
        result = self.about | {
            "partial": partial,
            "seconds": round(min(self.soak.now(), self.seconds), 1),
            "problems": problems[:SHOWN],
            "problems_number": len(problems),
            "planned": len(self.plan.workload.requests),
            "requests": dict(counts),
            "done": dict(sorted(self.soak.done.items())),
            "loaded_answers": self.controller.largest,
            "doubtful": self.controller.doubts.kept,
            "canaries": self.canaries.report(),
            "memory": soak.growth(memory, self.seconds),
            "memory_mib": [
                {"at_s": round(when)} | {name: round(size / 2**20) for name, size in row.items()}
                for when, row in memory[::SERIES]
            ],
            "drift": soak.drift(records, owners, self.seconds),
            "moved": moved(self.watch.pool.samples),
            "control_ms": {name: spread(times) for name, times in self.soak.times.items()},
            "left": self.left,
        }
        write_json(self.plan.options.json, result)
        return len(problems)


def say(text: str) -> None:
    print(text, flush=True)


def run(options: argparse.Namespace) -> bool:
    """Adapters, a server, the soak; whether there were no problems."""
    plan = Plan.make(options)
    start, settings = plan.start()
    say(f"{len(plan.folders)} adapters; {start.split.arithmetic}")
    about = {
        "what": "a soak: all workloads at once, adapters that come and go, clients that leave",
        "machine": machine(options.device),
        "versions": versions(options.device, options.commit or None),
        "seed": options.seed,
        "strict": options.strict,
        "loads": [asdict(load) for load in loads(options)],
        "adapters": len(plan.workload.adapters),
        "split": start.split.report(),
    }
    with serving([start], settings) as (server,):
        if isinstance(server, ServerError):
            raise server
        say(f"the server answered after {server.start_s:.0f} s")
        about |= {"command": without_paths(server.line), "start_s": server.start_s}
        return asyncio.run(Run(plan, server, about).run())


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--model", type=Path, required=True)
    found.add_argument("--json", type=Path, required=True)
    found.add_argument("--work-dir", type=Path, required=True, help="adapters, logs")
    found.add_argument("--budget-gb", type=float, default=12.0, help="adapters and KV, in 1e9")
    found.add_argument("--seconds", type=float, default=480.0, help="of the soak itself")
    found.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    found.add_argument("--workloads", default=",".join(LOADS), help="with commas")
    found.add_argument("--rate-scale", type=float, default=1.0)
    found.add_argument("--adapters", type=int, default=128, help="of a workload, at most")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--strict", action="store_true", help="all checks after each change: slow")
    found.add_argument("--start-limit", type=float, default=600.0, help="seconds")
    found.add_argument("--commit", default="", help="where the tree has no history")
    found.add_argument("--server-args", default="")
    found.add_argument("--graft-args", default="")
    return found


def main() -> int:
    """The command line. SIGTERM ends it as an exception does, and its server too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = parser().parse_args()
    options.work_dir = options.work_dir.resolve()
    try:
        return not run(options)
    except ValueError as error:
        parser().error(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
