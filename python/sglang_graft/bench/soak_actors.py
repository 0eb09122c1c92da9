"""What goes on in a soak beside its traffic: canaries, control, clients that leave, the watch.

Each of them runs until the soak is over, and reports what is wrong as a problem.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from sglang_graft.bench import gate
from sglang_graft.bench.client import request_body
from sglang_graft.bench.clock import RealClock
from sglang_graft.bench.samples import Sample, Sampler, graft_sample
from sglang_graft.bench.server import Running
from sglang_graft.bench.shape import ModelShape
from sglang_graft.bench.soak import (
    agreement,
    device_bytes,
    other_weights_found,
    pool_problems,
    resident,
)
from sglang_graft.bench.soak_doubts import Doubts
from sglang_graft.sim.workloads import FIRST_TOKEN, Workload

ANSWER_S = 120.0
"""For a canary or a control operation amid the traffic."""
CANARY_S, SAMPLE_S = 20.0, 1.0
OK = httpx.codes.OK
LARGEST = ("largest_gap_where_they_part", "largest_logprob_difference")


@dataclass(slots=True)
class Soak:
    """What all parts of a run share. Times are seconds since `begin`."""

    client: httpx.AsyncClient
    workload: Workload
    shape: ModelShape
    seconds: float
    folder: Path
    seed: int
    begin: float = field(default_factory=time.perf_counter)
    done: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    say: Callable[[str], None] = lambda text: None

    def now(self) -> float:
        return time.perf_counter() - self.begin

    def over(self) -> bool:
        return self.gone.is_set() or self.now() >= self.seconds

    def problem(self, text: str) -> None:
        """Without folders of this machine: the result is kept."""
        text = text.replace(str(self.folder), "WORK")
        self.problems.append(f"{self.now():.1f} s: {text[:600]}")
        self.say(self.problems[-1])

    async def until(self, when: float) -> None:
        """Sleep, but not beyond the end."""
        await RealClock().sleep_until(self.begin + min(when, self.seconds))

    async def post(self, what: str, path: str, body: dict[str, Any]) -> httpx.Response:
        """Count it, and remember how long it took."""
        start = time.perf_counter()
        response = await self.client.post(path, json=body)
        self.times.setdefault(what, []).append(time.perf_counter() - start)
        self.done[what] += 1
        return response

    async def get(self, path: str) -> Any:
        response = await self.client.get(path)
        response.raise_for_status()
        return response.json()

    def prompt(self, source: random.Random, length: int) -> list[int]:
        return [source.randrange(FIRST_TOKEN, self.shape.vocabulary) for _ in range(length)]


@dataclass(slots=True)
class Canaries:
    """The same questions to the base model and an adapter of each rank, again and again."""

    soak: Soak
    first: list[gate.Row] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)

    async def start(self) -> None:
        """Before any traffic, from an empty cache: what all later answers must be."""
        answers = await self._ask()
        self.first = answers["alone"]
        self.judge(answers["at_once"], "before the traffic, all at once", 0.0)

    async def run(self) -> None:
        while not self.soak.over():
            begun = self.soak.now()
            await self.round("amid the traffic")
            await self.soak.until(begun + CANARY_S)

    async def round(self, when: str) -> None:
        """Ask all of them one by one, and all at once."""
        begun = self.soak.now()
        try:
            answers = await self._ask()
        except httpx.HTTPError as error:
            self.soak.problem(f"canaries {when}: {error!r}")
            return
        for how, rows in answers.items():
            self.judge(rows, f"{when}, {how.replace('_', ' ')}", begun)

    def judge(self, rows: list[gate.Row], when: str, begun: float) -> None:
        """Compare with the first answers. They may part where two tokens are equally likely."""
        try:
            found = agreement(self.first, rows, self.soak.shape.dtype_name)
        except ValueError as error:  # answers of other lengths
            self.soak.problem(f"canaries {when}: {error}")
            return
        timed = {"at_s": begun, "seconds": self.soak.now() - begun, "when": when}
        self.rounds.append(timed | found)
        if not found["agree"]:
            self.soak.problem(f"canaries {when}: not the first answers: {found}")

    def report(self) -> dict[str, Any]:
        return {
            "questions": len(self.first),
            "other_weights_found": other_weights_found(self.first, self.soak.shape.dtype_name),
            "rounds": len(self.rounds),
            "agree": sum(row["agree"] for row in self.rounds),
            "answers": sum(row["answers"] for row in self.rounds),
            "equal": sum(row["equal"] for row in self.rounds),
            **{name: max((row[name] for row in self.rounds), default=None) for name in LARGEST},
            "by_round": self.rounds,
        }

    async def _ask(self) -> dict[str, list[gate.Row]]:
        one = {spec.rank: spec for spec in reversed(self.soak.workload.adapters)}
        asked = Workload("soak", 0, tuple(one.values()), self.soak.workload.requests)
        return await gate.ask(self.soak.client, asked, self.soak.shape.vocabulary, base_only=False)


@dataclass(slots=True)
class Controller:
    """Loads folders under new names, asks them, replaces and unloads them; sends bad input.

    known: folders that have a name from the start on, so that their weights are there already;
    spare: those that have none. truth: the first answer from each folder; held: what is loaded.
    """

    soak: Soak
    known: dict[str, Path]
    spare: dict[str, Path]
    held: list[str] = field(default_factory=list)
    truth: dict[str, gate.Row] = field(default_factory=dict)
    folders: dict[str, Path] = field(init=False)
    prompt: list[int] = field(init=False)
    source: random.Random = field(init=False)
    serial: int = 0
    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LARGEST, 0.0))
    doubts: Doubts = field(init=False)

    def __post_init__(self) -> None:
        self.doubts = Doubts(self.soak.shape.dtype_name)
        self.source = random.Random(f"controller {self.soak.seed}")
        self.prompt = self.soak.prompt(self.source, 64)
        self.folders = self.known | self.spare

    async def start(self) -> None:
        """The first answer from each folder. Raises httpx.HTTPError when there is none."""
        for name in self.known:
            self.truth[name] = await gate.answer(self.soak.client, name, self.prompt)
        for name in self.spare:
            (await self._load(name, name)).raise_for_status()
            self.truth[name] = await gate.answer(self.soak.client, name, self.prompt)
            (await self._unload(name)).raise_for_status()

    async def run(self) -> None:
        while not self.soak.over():
            try:
                if self.source.random() < 0.2:
                    await self.bad_input()
                else:
                    await self.step()
            except httpx.HTTPError as error:
                self.soak.problem(f"a control operation: {error!r}")
            await self.soak.until(self.soak.now() + self.source.random())

    async def step(self) -> None:
        """Load one; replace it sometimes; unload the oldest once there are several."""
        self.serial += 1
        name = f"soak-{self.serial}"
        if not await self._load_and_ask("load", name):
            return
        self.held.append(name)
        if self.source.random() < 0.3:
            await self._load_and_ask("replace", name, load_inplace=True)
        if len(self.held) > 3:
            await self._unload_twice(self.held.pop(0))

    async def bad_input(self) -> None:
        """Each must be refused, and change nothing."""
        nobody = {"lora_name": "nobody"}
        asked = request_body(self.prompt, self.source.choice([*self.known]), -5)
        for what, path, body in (
            ("an unknown adapter", "/generate", request_body(self.prompt, "nobody", 4)),
            ("a negative max_new_tokens", "/generate", asked),
            ("a folder that is not there", "/load_lora_adapter",
             nobody | {"lora_path": str(self.soak.folder / "not-there")}),
            ("an unload of nobody", "/unload_lora_adapter", nobody),
        ):  # fmt: skip
            status = (await self.soak.post("bad input", path, body)).status_code
            if not 400 <= status < 500:
                self.soak.problem(f"{what} was answered with {status}")

    async def _load_and_ask(self, what: str, name: str, **more: Any) -> bool:
        origin = self.source.choice([*self.folders])
        response = await self._load(name, origin, what, **more)
        if response.status_code != OK:
            self.soak.problem(f"{what} of {origin}: {response.status_code} {response.text[:300]}")
            return False
        self.check(what, origin, await gate.answer(self.soak.client, name, self.prompt))
        return True

    def check(self, what: str, origin: str, row: gate.Row) -> None:
        """Its answer must be the first one from the same folder."""
        named = row | {"name": self.truth[origin]["name"]}
        try:
            found = agreement([self.truth[origin]], [named], self.soak.shape.dtype_name)
        except ValueError as error:  # of another length
            self.soak.problem(f"{what} of {origin}: {error}")
            return
        self.largest |= {name: max(self.largest[name], found[name]) for name in LARGEST}
        self.soak.done["loaded answers equal" if found["equal"] else "loaded answers parted"] += 1
        if not found["agree"]:
            text = f"{self.soak.now():.1f} s: {what} of {origin}: it answers as another adapter"
            self.doubts.add(f"{text}: {found}", origin, self.truth[origin], row)
            self.soak.say(text)

    async def judge(self) -> None:
        """Doubtful answers again, when nothing else is asked."""
        await self.doubts.judge(self._force)

    async def _force(self, origin: str, ids: list[int]) -> list[tuple[float, float]]:
        (await self._load("judge", origin)).raise_for_status()
        found = await gate.forced(self.soak.client, "judge", self.prompt, ids)
        (await self._unload("judge")).raise_for_status()
        return found

    async def _load(
        self, name: str, origin: str, what: str = "load", **more: Any
    ) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(self.folders[origin]), **more}
        return await self.soak.post(what, "/load_lora_adapter", body)

    async def _unload(self, name: str) -> httpx.Response:
        return await self.soak.post("unload", "/unload_lora_adapter", {"lora_name": name})

    async def _unload_twice(self, name: str) -> None:
        first, second = await self._unload(name), await self._unload(name)
        if first.status_code != OK or not 400 <= second.status_code < 500:
            self.soak.problem(f"unload of {name}: {first.text[:300]}, then {second.text[:300]}")


@dataclass(slots=True)
class Leavers:
    """Clients that leave amid a stream, and aborts of requests by their id."""

    soak: Soak
    source: random.Random = field(init=False)
    serial: int = 0

    def __post_init__(self) -> None:
        self.source = random.Random(f"leavers {self.soak.seed}")

    async def run(self) -> None:
        while not self.soak.over():
            adapter = self.source.choice([None, *(a.name for a in self.soak.workload.adapters)])
            prompt = self.soak.prompt(self.source, self.source.randint(16, 600))
            body = request_body(prompt, adapter, 400) | {"stream": True}
            try:
                await self.source.choice([self.leave, self.abort])(body)
            except httpx.HTTPError as error:
                self.soak.problem(f"a client that leaves or aborts: {error!r}")
            await self.soak.until(self.soak.now() + self.source.random())

    async def leave(self, body: dict[str, Any]) -> None:
        """Close the connection, before or after the first token."""
        task = asyncio.create_task(self._read(body))
        await asyncio.wait([task], timeout=self.source.random() * 2)
        await _ended(task)
        self.soak.done["leave"] += 1

    async def abort(self, body: dict[str, Any]) -> None:
        """The stream must end. An abort that came before its request found nothing: again."""
        self.serial += 1
        rid = f"soak-{self.soak.seed}-{self.serial}"
        task = asyncio.create_task(self._read(body | {"rid": rid}))
        try:
            await asyncio.wait([task], timeout=self.source.random() * 2)
            deadline = time.perf_counter() + ANSWER_S
            while not task.done() and time.perf_counter() < deadline:
                await self.soak.post("abort", "/abort_request", {"rid": rid})
                await asyncio.wait([task], timeout=0.1)
            if not task.done():
                self.soak.problem(f"a request went on for {ANSWER_S:g} s after its abort")
        finally:
            await _ended(task)

    async def _read(self, body: dict[str, Any]) -> None:
        async with self.soak.client.stream("POST", "/generate", json=body) as response:
            if response.status_code != OK and "rid" not in body:
                text = (await response.aread()).decode(errors="replace")
                self.soak.problem(f"a client that leaves: {response.status_code} {text[:300]}")
            async for _ in response.aiter_lines():
                pass


async def _ended(task: asyncio.Task[None]) -> None:
    """End it, if it has not. Raises what it raised."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


@dataclass(slots=True)
class Watch:
    """The pool's report and memory, each second."""

    soak: Soak
    server: Running
    device: str
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    pool: Sampler = field(init=False)

    def __post_init__(self) -> None:
        self.pool = Sampler(self.soak.client, "/graft/pool", self._read, RealClock(), SAMPLE_S)

    async def run(self) -> None:
        """Ends the soak when the server has ended."""
        task = asyncio.create_task(self.pool.run())
        while not self.soak.over():
            now = self.soak.now()
            try:
                row = await asyncio.to_thread(resident, self.server.launched.pid)
            except psutil.NoSuchProcess:
                self.soak.problem("the server has ended")
                self.soak.gone.set()
                break
            self.memory.append((now, row | device_bytes(self.device)))
            await self.soak.until(now + SAMPLE_S)
        await self.pool.stop(task)
        if self.pool.missed:
            self.soak.problem(f"{self.pool.missed} reports of /graft/pool did not come")

    def _read(self, report: Any, at_s: float) -> Sample:
        for text in pool_problems(report):
            self.soak.problem(text)
        return graft_sample(report, at_s)
