"""Do running requests slow down while adapters stream in? Their inter-token gaps, beside warm and
cold traffic.

    python benchmark/serving/bench_gap.py --model BASE --json OUT [--device cuda|cpu]
        [--server-args="--attention-backend flashinfer"] [--graft-args="..."]

One Graft server, whose pool cannot hold all adapters. `--running` long streamed requests decode on
`--warm` adapters. Beside them, in turns, three phases of `--seconds`:

- `quiet`: nothing else;
- `cold`: short requests at `--rate`, each on the adapter that has been unused for longest, of more
  than the pool can hold: every one is copied from host memory;
- `warm`: the same requests (arrivals, prompts, lengths), all on one adapter that is on the device.

So prefills and added decode rows are in both of the last two, and only the copies differ. A round
has each phase once, cold and warm in turns first; its running requests are new. A first round warms
up and is not counted. Loads and bytes are the server's own counts (/graft/pool); it is an error
when fewer than nine in ten cold requests caused a load, or more than one in ten warm ones did.

Gaps are what a client sees: an event with several tokens counts as so many equal gaps. The goal is
a ratio of cold to warm of at most 1.05 (`cold_over_warm`). In cold phases up to rate x answer time
more distinct adapters decode at once; that is in the ratio too. What this does not show: loads from
disk, KV that comes back from the host, other rates. The file is written after each round with all
rounds so far; `rounds_done` says how many.
"""

import argparse
import asyncio
import json
import math
import random
import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from sglang_graft.bench.budget import Split
from sglang_graft.bench.client import request_body
from sglang_graft.bench.clock import RealClock
from sglang_graft.bench.figures import spread
from sglang_graft.bench.machine import machine, versions
from sglang_graft.bench.make_adapters import make_adapters
from sglang_graft.bench.peers import parse_peers
from sglang_graft.bench.server import Running, ServerError, Settings, Start, serving
from sglang_graft.bench.shape import ModelShape
from sglang_graft.sim.workloads import FIRST_TOKEN, AdapterSpec

GOAL = 1.05
ROOM = 8
"""Adapters for which the pool has room besides those of running requests."""
DISTINCT = 8
"""Weight files; further adapters are links to them with a scale of their own."""
TOUCHED = "touched"


@dataclass(frozen=True)
class Sizes:
    """The pool, and how many adapters are more than it can hold."""

    split: Split
    adapter_pages: int
    cold: int

    @classmethod
    def of(cls, options: argparse.Namespace, shape: ModelShape) -> "Sizes":
        """Room for what runs, its adapters and a few more."""
        layout = shape.layout
        weights = layout.pages_for_bytes(options.rank * shape.adapter_bytes_per_rank)
        running = options.running * (layout.pages_for(options.prompt + options.tokens) + 1)
        short = 2 * ROOM * (layout.pages_for(options.prompt + options.answer) + 1)
        others = running + short + ROOM * weights
        pages = others + (options.warm + 1) * weights
        text = f"{pages} pages of {layout.page_bytes} B"
        size = pages * layout.page_bytes
        split = Split(size, 0, pages * layout.page_tokens, size, text)
        return cls(split, weights, others // weights + 2)


async def read(
    client: httpx.AsyncClient, body: dict[str, Any], arrivals: list[tuple[float, int]]
) -> None:
    """Stream one answer; `arrivals` gets (seconds, tokens so far) of each event."""
    async with client.stream("POST", "/generate", json=body | {"stream": True}) as response:
        if response.status_code != httpx.codes.OK:
            raise SystemExit(f"a request failed: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            # With incremental output an event is short: the new tokens and the counts.
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise SystemExit(f"a request failed: {event['error']}")
                arrivals.append((time.perf_counter(), event["meta_info"]["completion_tokens"]))


@dataclass
class Streams:
    """The running requests of a round. `arrivals`: of each, as `read` makes them."""

    client: httpx.AsyncClient
    arrivals: list[list[tuple[float, int]]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self, bodies: list[dict[str, Any]]) -> None:
        """Send all of them; returns once each has a token."""
        self.arrivals = [[] for _ in bodies]
        for body, arrivals in zip(bodies, self.arrivals, strict=True):
            self.tasks.append(asyncio.create_task(read(self.client, body, arrivals)))
        while not all(self.arrivals):
            self.check()
            await asyncio.sleep(0.02)

    def check(self) -> None:
        """Every one must go on to the end of the round."""
        for task in self.tasks:
            if task.done():
                task.result()  # its own error, if that is what ended it
                raise SystemExit("a running request has ended: raise --tokens or lower --seconds")

    async def end(self) -> None:
        """Abort them."""
        (await self.client.post("/abort_request", json={"abort_all": True})).raise_for_status()
        await asyncio.gather(*self.tasks)

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds for each token of all of them that came within a time."""
        found = []
        for arrivals in self.arrivals:
            inside = [(when, tokens) for when, tokens in arrivals if start <= when <= end]
            for (before, some), (when, tokens) in pairwise(inside):
                if tokens > some:
                    found += [(when - before) / (tokens - some)] * (tokens - some)
        return found


@dataclass
class Phases:
    """Runs phases on one server. `rounds`: what each phase of each round gave, by kind."""

    client: httpx.AsyncClient
    options: argparse.Namespace
    vocabulary: int
    cold: int
    next_cold: int = 0
    rounds: list[dict[str, dict[str, Any]]] = field(default_factory=list)

    async def round(self, number: int) -> None:
        """Every phase once, beside running requests of their own."""
        source = random.Random(f"running {number}")
        streams = Streams(self.client)
        await streams.start(
            [
                self._body(source, f"warm-{index % self.options.warm}", self.options.tokens)
                for index in range(self.options.running)
            ]
        )
        kinds = ["quiet", *(("cold", "warm") if number % 2 else ("warm", "cold"))]
        found = {kind: await self._phase(kind, number, streams) for kind in kinds}
        await streams.end()
        self.rounds.append(found)

    async def _phase(self, kind: str, number: int, streams: Streams) -> dict[str, Any]:
        """The first `settle` seconds do not count; requests that are under way at the end do."""
        source = random.Random(f"short {number}")  # equal for cold and warm
        await self._first_token(0, self._body(random.Random(f"{kind} {number}"), TOUCHED, 1))
        before = await self._counts()
        begin = due = time.perf_counter()
        start = begin + self.options.settle
        end = start + self.options.seconds
        tasks = []
        while kind != "quiet" and (due := due + source.expovariate(self.options.rate)) < end:
            body = self._body(source, self._name(kind), self.options.answer)
            tasks.append(asyncio.create_task(self._first_token(due, body)))
        await RealClock().sleep_until(end)
        streams.check()
        first = await asyncio.gather(*tasks)
        after = await self._counts()
        return {
            "gaps": streams.gaps(start, end),
            "first_token_s": first,
            "requests": len(tasks),
            **{name: after[name] - before[name] for name in after},
        }

    def _name(self, kind: str) -> str:
        if kind == "warm":
            return TOUCHED
        self.next_cold += 1
        return f"cold-{self.next_cold % self.cold}"

    def _body(self, source: random.Random, name: str, tokens: int) -> dict[str, Any]:
        length = self.options.prompt
        prompt = [source.randrange(FIRST_TOKEN, self.vocabulary) for _ in range(length)]
        return request_body(prompt, name, tokens)

    async def _first_token(self, due: float, body: dict[str, Any]) -> float:
        """Send when it is due; seconds from then to the first token."""
        await RealClock().sleep_until(due)
        arrivals: list[tuple[float, int]] = []
        await read(self.client, body, arrivals)
        return arrivals[0][0] - due

    async def _counts(self) -> dict[str, int]:
        response = await self.client.get("/graft/pool")
        response.raise_for_status()
        report = response.json()
        host, page = report["host"], report["page_bytes"]
        return {
            "loads": host["loads"],
            "disk_reads": host["disk_reads"],
            "bytes_to_device": host["pages_to_device"] * page,
        }


def summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """All rounds as one, by kind, and cold over warm. SystemExit when cold was not cold."""
    found: dict[str, Any] = {}
    for kind in rounds[0]:
        own = [phases[kind] for phases in rounds]
        sums = ("requests", "loads", "disk_reads", "bytes_to_device")
        found[kind] = {
            "gap_ms": spread([gap for phase in own for gap in phase["gaps"]]),
            "gaps": sum(len(phase["gaps"]) for phase in own),
            "first_token_ms": spread([s for phase in own for s in phase["first_token_s"]]),
            **{name: sum(phase[name] for phase in own) for name in sums},
        }
    cold, warm = found["cold"], found["warm"]
    if cold["loads"] < 0.9 * cold["requests"] or warm["loads"] > 0.1 * warm["requests"]:
        raise SystemExit(f"wanted a load for each cold request and none for warm ones, got {found}")
    by_round = [
        statistics.mean(phases["cold"]["gaps"]) / statistics.mean(phases["warm"]["gaps"])
        for phases in rounds
    ]
    figures = ("mean", "p50", "p99")
    return found | {
        "cold_over_warm": {key: cold["gap_ms"][key] / warm["gap_ms"][key] for key in figures},
        "cold_over_warm_mean_by_round": by_round,
        "rounds_done": len(rounds),
        "warm_over_quiet": {
            key: warm["gap_ms"][key] / found["quiet"]["gap_ms"][key] for key in figures
        },
        "goal": GOAL,
    }


Keep = Callable[[dict[str, Any]], None]


async def measure(
    server: Running, options: argparse.Namespace, shape: ModelShape, sizes: Sizes, keep: Keep
) -> None:
    """A round to warm up, and those that count; `keep` gets the summary after each of these."""
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=600) as client:
        phases = Phases(client, options, shape.vocabulary, sizes.cold)
        for number in range(options.rounds + 1):
            await phases.round(number)
            print(f"round {number} of {options.rounds} done", flush=True)
            if number:
                keep(summary(phases.rounds[1:]))


def run(options: argparse.Namespace, write: Keep) -> None:
    """Adapters, a server, all rounds; `write` gets the whole result after each."""
    shape = ModelShape.read(options.model, options.device)
    sizes = Sizes.of(options, shape)
    names = [TOUCHED, *(f"warm-{index}" for index in range(options.warm))]
    names += [f"cold-{index}" for index in range(sizes.cold)]
    specs = tuple(AdapterSpec(name, options.rank) for name in names)
    adapters = make_adapters(options.work / "adapters", specs, shape, seed=0, distinct=DISTINCT)
    # Images of all of them, and as much again for KV that leaves the device.
    images = len(names) * sizes.adapter_pages * shape.layout.page_bytes
    host_gb = max(1, math.ceil(2 * images / 2**30))
    more = ["--incremental-streaming-output", *shlex.split(options.server_args)]
    settings = Settings(
        model=options.model.resolve(),
        shape=shape,
        device=options.device,
        more={"all": more, "graft": shlex.split(options.graft_args)},
        start_limit_s=options.start_limit,
    )
    (peer,) = parse_peers([f"graft:host-memory-gb={host_gb}"])
    start = Start(peer, sizes.split, adapters, options.work / "logs" / "gap.log")
    keys = ("running", "warm", "rate", "seconds", "settle", "rounds", "prompt", "tokens", "answer")
    about = {
        "what": "inter-token gaps of running requests while adapters stream in",
        "machine": machine(options.device),
        "versions": versions(options.device, options.commit or None),
        "settings": {key: getattr(options, key) for key in (*keys, "rank")},
        "flags": [*more, *settings.more["graft"], *peer.flags],
        "pool": sizes.split.arithmetic,
        "adapter_bytes": sizes.adapter_pages * shape.layout.page_bytes,
        "cold_adapters": sizes.cold,
    }
    with serving([start], settings) as (server,):
        if isinstance(server, ServerError):
            raise server
        print(f"the server answered after {server.start_s:.0f} s", flush=True)
        asyncio.run(measure(server, options, shape, sizes, lambda found: write(about | found)))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--model", type=Path, required=True)
    found.add_argument("--json", type=Path, required=True)
    found.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    found.add_argument("--work", type=Path, default=Path("/tmp/bench-gap"), help="adapters, logs")
    found.add_argument("--running", type=int, default=16, help="long requests")
    found.add_argument("--warm", type=int, default=4, help="adapters that these use")
    found.add_argument("--rate", type=float, default=8.0, help="short requests a second")
    found.add_argument("--seconds", type=float, default=4.0, help="of a phase")
    found.add_argument("--settle", type=float, default=0.5, help="before them, not counted")
    found.add_argument("--rounds", type=int, default=6)
    found.add_argument("--prompt", type=int, default=128, help="tokens")
    found.add_argument("--tokens", type=int, default=3072, help="at most, of a long request")
    found.add_argument("--answer", type=int, default=4, help="tokens of a short request")
    found.add_argument("--rank", type=int, default=16)
    found.add_argument("--start-limit", type=float, default=600.0, help="seconds")
    found.add_argument("--commit", default="", help="where the tree has no history")
    found.add_argument("--server-args", default="")
    found.add_argument("--graft-args", default="")
    return found


def main() -> None:
    """Print the figures without the versions; write all of them."""
    options = parser().parse_args()
    if options.rounds < 1:
        parser().error(f"--rounds: wanted 1 or more, got {options.rounds}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    last: dict[str, Any] = {}

    def write(result: dict[str, Any]) -> None:
        last.update(result)
        part = options.json.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(options.json)

    run(options, write)
    print(json.dumps({k: v for k, v in last.items() if k != "versions"}, indent=1))


if __name__ == "__main__":
    main()
