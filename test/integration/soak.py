"""Random loads, unloads, replacements, aborts and disconnects over 20 adapters in a small pool.

    python test/integration/soak.py --minutes 10 --seed 1

Every completed answer is compared with transformers and PEFT; which weights a request may have had
follows from what its name led to between its start and its end. The last line of the output is one
JSON object: what was done, what went wrong (`problems`, empty when all is well), the memory of the
scheduler process and the right answers a second, both early and late. Exit code 1 when something
went wrong.
"""

import argparse
import contextlib
import json
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tiny_adapters
import tiny_model
import torch
from harness import STRICT, Request, Server, greedy, serve
from lifecycle import BAD_REQUEST, NOT_FOUND, OK, Stream, scheduler_memory
from reference import Reference, difference

VERSIONS = {f"v{i:02}": (2, 4, 8, 16)[i % 4] for i in range(20)}
NAMES = tuple(f"name-{i}" for i in range(8))
PROMPTS = tuple(tiny_model.prompt(length, seed) for seed, length in enumerate((12, 40, 40, 90)))
NEW_TOKENS = 24
POOL_PAGES = 110
PAGE = 16
CLIENTS, CONTROLLERS = 6, 2
FLAT = 1.02
FLAGS = (
    *("--page-size", str(PAGE), "--max-total-tokens", str(POOL_PAGES * PAGE)),
    *("--max-loras-per-batch", "4", "--chunked-prefill-size", "64"),
    *("--schedule-conservativeness", "0.1"),
)


@dataclass
class Name:
    """What a name led to, in order (None: nothing), and up to where that is certain."""

    history: list[str | None] = field(default_factory=lambda: [None])
    certain: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Soak:
    """The state of one run. Client threads and controller threads share it."""

    server: Server
    folders: dict[str, Path]
    truth: Reference
    end: float
    done: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)
    names: dict[str, Name] = field(default_factory=lambda: {name: Name() for name in NAMES})
    memory: list[tuple[float, int]] = field(default_factory=list)
    answered: list[tuple[float, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    serial: int = 0

    def count(self, what: str) -> None:
        with self.lock:
            self.done[what] += 1

    def problem(self, text: str) -> None:
        with self.lock:
            self.problems.append(text)

    def next_id(self) -> str:
        with self.lock:
            self.serial += 1
            return f"soak-{self.serial}"

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Remember the slowest call of each kind."""
        start = time.monotonic()
        yield
        with self.lock:
            took = time.monotonic() - start
            self.slowest[what] = round(max(took, self.slowest.get(what, 0)), 3)


class Client:
    """Sends one random request after the other, and checks what comes back."""

    def __init__(self, soak: Soak, seed: int) -> None:
        self.soak = soak
        self.source = random.Random(seed)
        kinds = {self.plain: 8, self.samples: 3, self.stream: 4, self.leave: 4, self.abort: 3}
        kinds |= {self.invalid: 1, self.nobody: 1}
        self.kinds: dict[Callable[[Request], None], int] = kinds

    def run(self) -> None:
        """Until the end of the soak."""
        while time.monotonic() < self.soak.end:
            name = self.source.choice([None, *NAMES, *NAMES])
            request = Request(name, self.source.choice(PROMPTS), NEW_TOKENS)
            (kind,) = self.source.choices([*self.kinds], [*self.kinds.values()])
            self.soak.count(kind.__name__)
            try:
                kind(request)
            except httpx.TransportError as error:
                self.soak.problem(f"{kind.__name__} of {name}: {error!r}")

    def plain(self, request: Request) -> None:
        self.post(request, request.body(), 1)

    def samples(self, request: Request) -> None:
        n = self.source.randint(2, 4)
        self.post(request, request.body() | {"sampling_params": greedy(NEW_TOKENS, n=n)}, n)

    def stream(self, request: Request) -> None:
        start = self.certain(request)
        stream = Stream(self.soak.server, request)
        stream.join()
        self.judge(request, start, stream.status_code, [stream.tokens])

    def leave(self, request: Request) -> None:
        n = self.source.choice([1, 1, 2])
        stream = Stream(self.soak.server, request, sampling_params=greedy(500, n=n))
        time.sleep(self.source.random() * 0.4)
        stream.leave()

    def abort(self, request: Request) -> None:
        rid = self.soak.next_id()
        start = self.certain(request)
        stream = Stream(self.soak.server, request, rid=rid, sampling_params=greedy(500))
        time.sleep(self.source.random() * 0.3)
        while stream.is_running():  # one that came before its request found nothing
            self.soak.server.post("/abort_request", {"rid": rid})
            time.sleep(0.05)
        tokens = stream.tokens[:NEW_TOKENS]
        if len(tokens) == NEW_TOKENS:
            self.judge(request, start, stream.status_code, [tokens])

    def invalid(self, request: Request) -> None:
        body = request.body() | {"sampling_params": {"top_p": 7}}
        status = self.soak.server.post("/generate", body).status_code
        if status not in (BAD_REQUEST, NOT_FOUND):
            self.soak.problem(f"an invalid request was answered with {status}")

    def nobody(self, request: Request) -> None:
        body = request.body() | {"lora_path": "nobody"}
        status = self.soak.server.post("/generate", body).status_code
        if status != NOT_FOUND:
            self.soak.problem(f"an unknown adapter was answered with {status}")

    def post(self, request: Request, body: dict[str, Any], n: int) -> None:
        start = self.certain(request)
        response = self.soak.server.post("/generate", body)
        answers = response.json() if response.status_code == OK else []
        answers = answers if isinstance(answers, list) else [answers]
        self.judge(request, start, response.status_code, [a["output_ids"] for a in answers])
        if answers and len(answers) != n:
            self.soak.problem(f"{len(answers)} answers for n = {n}")

    def certain(self, request: Request) -> int:
        return 0 if request.adapter is None else self.soak.names[request.adapter].certain

    def judge(self, request: Request, start: int, status: int, answers: list[list[int]]) -> None:
        """Whether an answer is that of weights that the name led to meanwhile."""
        allowed: list[str | None] = [None]
        if request.adapter is not None:
            allowed = self.soak.names[request.adapter].history[start:]
        if status == NOT_FOUND and request.adapter is not None and None in allowed:
            self.soak.count("not found")
            return
        if status == BAD_REQUEST and request.adapter is not None and None in allowed:
            self.soak.count("unloaded on its way")
            return
        if status != OK:
            self.soak.problem(f"{request.adapter}: status {status}, it led to {allowed}")
            return
        versions = [v for v in allowed if v is not None or request.adapter is None]
        for tokens in answers:
            wanted = [self.soak.truth.answer(v, request.prompt, NEW_TOKENS) for v in versions]
            found = [difference(tokens, answer) for answer in wanted]
            if None in found:
                self.soak.count("right answers")
            else:
                self.soak.problem(f"{request.adapter}, which led to {versions}: {found}")


class Controller:
    """Loads, unloads and replaces at random; one operation on one name at a time."""

    def __init__(self, soak: Soak, seed: int, broken: Path) -> None:
        self.soak, self.broken = soak, broken
        self.source = random.Random(seed)

    def run(self) -> None:
        """Until the end of the soak."""
        while time.monotonic() < self.soak.end:
            name = self.source.choice(NAMES)
            state = self.soak.names[name]
            with state.lock:
                try:
                    self.step(name, state)
                except httpx.TransportError as error:
                    self.soak.problem(f"an operation on {name}: {error!r}")
            time.sleep(self.source.random() * 0.3)

    def step(self, name: str, state: Name) -> None:
        draw = self.source.random()
        if draw < 0.1:
            self.refused(name, state)
        elif draw < 0.14:
            self.pause()
        elif state.history[-1] is None:
            self.load(name, state)
        elif draw < 0.55:
            self.load(name, state, load_inplace=True)
        else:
            self.unload(name, state)

    def load(self, name: str, state: Name, **more: Any) -> None:
        version = self.source.choice(sorted(VERSIONS))
        what = "replace" if more else "load"
        if self.source.random() < 0.15:
            more |= {"pinned": True}
        before = len(state.history) - 1
        state.history.append(version)
        with self.soak.timed(what):
            response = self.soak.server.load(name, self.soak.folders[version], **more)
        if response.status_code == OK:
            state.certain = before + 1
            self.soak.count(what + " pinned" if "pinned" in more else what)
        else:
            state.history.append(state.history[before])  # as before; nobody saw the other
            state.certain = before
            self.soak.count("pin refused")
            if "pinned" not in more:
                self.soak.problem(f"{what} of {name}: {response.text}")

    def unload(self, name: str, state: Name) -> None:
        state.history.append(None)
        with self.soak.timed("unload"):
            first = self.soak.server.unload(name)
        second = self.soak.server.unload(name)
        state.certain = len(state.history) - 1
        self.soak.count("unload")
        if (first.status_code, second.status_code) != (OK, BAD_REQUEST):
            self.soak.problem(f"unload of {name}: {first.text}, then {second.text}")

    def refused(self, name: str, state: Name) -> None:
        """A broken folder, also in place; and a name that is taken."""
        responses = [self.soak.server.load(name, self.broken, load_inplace=True)]
        if state.history[-1] is not None:
            responses.append(self.soak.server.load(name, self.soak.folders["v00"]))
        self.soak.count("refused loads")
        for response in responses:
            if response.status_code != BAD_REQUEST:
                self.soak.problem(f"a bad load of {name}: {response.status_code}")

    def pause(self) -> None:
        mode = self.source.choice(["in_place", "retract"])
        self.soak.server.post("/pause_generation", {"mode": mode})
        time.sleep(self.source.random() * 0.3)
        self.soak.server.post("/continue_generation")
        self.soak.count("pause")


def watch(soak: Soak) -> None:
    """Sample memory and pool until the end of the soak."""
    start = time.monotonic()
    while time.monotonic() < soak.end:
        now = time.monotonic() - start
        soak.memory.append((now, scheduler_memory(soak.server)))
        soak.answered.append((now, soak.done["right answers"]))
        report = soak.server.pool()
        owners = ("free", "adapter", "kv_cached", "kv_running", "in_flight")
        if sum(report["pages"][o] for o in owners) != POOL_PAGES or report["invalid_kv_pages"]:
            soak.problem(f"the pool report does not add up: {report['pages']}")
        time.sleep(1)


def memory_report(samples: list[tuple[float, int]]) -> dict[str, float]:
    """Median resident bytes of the second and of the last quarter: the first one warms up."""
    length = samples[-1][0]
    early = statistics.median(b for t, b in samples if length / 4 <= t < length / 2)
    late = statistics.median(b for t, b in samples if t >= length * 3 / 4)
    return {"warm_mib": round(early / 2**20, 1), "end_mib": round(late / 2**20, 1),
            "ratio": round(late / early, 4)}  # fmt: skip


def rate_report(samples: list[tuple[float, int]]) -> dict[str, float]:
    """Right answers a second in the second and in the last quarter of the samples."""
    quarter = len(samples) // 4
    ends = {"warm": (quarter, 2 * quarter), "end": (-quarter - 1, -1)}
    found = {}
    for when, (first, last) in ends.items():
        (before, some), (after, more) = samples[first], samples[last]
        found[when] = round((more - some) / (after - before), 3)
    return found


def check_end(soak: Soak, start: dict[str, Any]) -> None:
    """Nothing is left of any request, and all counters are back."""
    soak.server.settle()
    for row in soak.server.pool()["adapters"]:
        soak.server.unload(row["name"])
    soak.server.flush()
    end = soak.server.pool()
    for key in ("pages", "adapter_host_bytes", "retired", "adapters"):
        if end[key] != start[key]:
            soak.problem(f"{key}: {start[key]} at the start, {end[key]} at the end")
    left = soak.server.requests()
    if left != {"total": 0, "adapters": {}, "retired": []}:
        soak.problem(f"requests are left: {left}")


def prepare(folder: Path) -> tuple[Path, dict[str, Path], Reference]:
    """Model, adapters, and every answer that can be asked for."""
    model = tiny_model.save_model(folder / "base")
    lora = {"lora_alpha": 16, "target_modules": list(tiny_adapters.ALL)}
    folders = {
        version: tiny_adapters.save(folder / version, lora | {"r": rank}, seed=700 + number)
        for number, (version, rank) in enumerate(VERSIONS.items())
    }
    torch.set_num_threads(1)
    truth = Reference(tiny_model.new_model(), folders)
    for version in (None, *VERSIONS):
        for prompt in PROMPTS:
            truth.answer(version, prompt, NEW_TOKENS)
    return model, folders, truth


def run(seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """Prepare in `folder`, run for `seconds`, report."""
    model, folders, truth = prepare(folder)
    broken = tiny_adapters.save(folder / "broken", {"r": 4, "target_modules": ["q_proj"]}, seed=1)
    (broken / tiny_adapters.WEIGHTS).write_bytes(b"broken")
    (folder / "server").mkdir()
    with serve(model, folder / "server", *FLAGS, env=STRICT) as server:
        start = server.pool()
        soak = Soak(server, folders, truth, time.monotonic() + seconds)
        work = [Client(soak, seed * 100 + i).run for i in range(CLIENTS)]
        work += [Controller(soak, seed * 100 + 50 + i, broken).run for i in range(CONTROLLERS)]
        threads = [threading.Thread(target=target) for target in work]
        for thread in threads:
            thread.start()
        try:
            watch(soak)
        finally:
            soak.end = 0  # the clients stop too when the server has died
            for thread in threads:
                thread.join()
        check_end(soak, start)
    memory = memory_report(soak.memory)
    if memory["ratio"] > FLAT:
        soak.problem(f"resident memory grew: {memory}")
    return {
        "seconds": round(seconds),
        "seed": seed,
        "done": dict(sorted(soak.done.items())),
        "slowest_seconds": soak.slowest,
        "memory": memory,
        "right_answers_per_s": rate_report(soak.answered),
        "problems": soak.problems[:20],
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.minutes < 1:
        parser.error(f"--minutes: wanted 1 or more, got {given.minutes:g}")
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    report = run(given.minutes * 60, given.seed, folder)
    if report["problems"]:
        print(f"log of the server: {folder / 'server' / 'server.log'}")
    else:
        shutil.rmtree(folder)
    print(json.dumps(report))
    return bool(report["problems"])


if __name__ == "__main__":
    raise SystemExit(main())
