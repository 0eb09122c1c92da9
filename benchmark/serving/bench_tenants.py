#!/usr/bin/env python3
"""Does a flood of one tenant slow another? P99 time to first token of b, quiet and under a's flood.

One CPU server with a tiny random model and --graft-tenants. Phase "quiet": b alone sends short
prompts to its own adapter. Phase "flood": the same again, while a keeps requests to 50 cold
adapters under way below its page cap. Phase "flood_no_limits" (with --without): the flood once more
after the file was changed to have neither floor nor cap, which says what the two are worth.

Prints one JSON object: seconds, ratios to the quiet run, b's pages, a's loads. Nothing is asserted
but that no request failed and that b's pages stayed at or above its floor.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "test/integration"), str(ROOT / "test")]

import tenant_world  # noqa: E402
import tiny_model  # noqa: E402
from harness import Request, Server, serve  # noqa: E402

POOL_PAGES = 160
PROMPT, ANSWER = 48, 8
FLOOD_PROMPT, FLOOD_ANSWER = 48, 8


def first_token(server: Server, request: Request) -> float:
    """Seconds from sending a streamed request to its first token."""
    body, start = request.body() | {"stream": True}, time.perf_counter()
    with server.client.stream("POST", server.url + "/generate", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        line = next(line for line in lines if line.startswith("data: "))
        seconds = time.perf_counter() - start
        assert "error" not in json.loads(line.removeprefix("data: ")), line
        for line in lines:
            assert '"error"' not in line, line
    return seconds


class Flood:
    """a's requests to every cold adapter in turn, `width` at a time, until it is stopped."""

    def __init__(self, server: Server, adapters: int, width: int) -> None:
        self.server, self.adapters = server, adapters
        self.stop = threading.Event()
        self.answered = 0
        self.failed: list[str] = []
        self._lock = threading.Lock()
        self._next = 0
        self._threads = ThreadPoolExecutor(width)
        self._pending = [self._threads.submit(self._run) for _ in range(width)]

    def _run(self) -> None:
        while not self.stop.is_set():
            with self._lock:
                number, self._next = self._next, self._next + 1
            prompt = tiny_model.prompt(FLOOD_PROMPT, seed=10_000 + number)
            request = Request(f"a/x{number % self.adapters}", prompt, FLOOD_ANSWER)
            answer = self.server.post("/generate", request.body())
            with self._lock:
                self.answered += 1
                if answer.status_code != 200:
                    self.failed.append(answer.text)

    def end(self) -> None:
        """Let what is under way end."""
        self.stop.set()
        for pending in self._pending:
            pending.result()
        self._threads.shutdown()


def measure(server: Server, count: int, pause: float, seed: int) -> list[float]:
    """Times to first token of b's requests, one after the other, `pause` seconds between them."""
    seconds = []
    for number in range(count):
        prompt = tiny_model.prompt(PROMPT, seed=seed + number)
        seconds.append(first_token(server, Request("b/main", prompt, ANSWER)))
        time.sleep(pause)
    return seconds


def summary(seconds: list[float]) -> dict[str, float]:
    """Quantiles in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {
        "requests": len(seconds),
        "p50_ms": round(cuts[49] * 1e3, 2),
        "p90_ms": round(cuts[89] * 1e3, 2),
        "p99_ms": round(cuts[98] * 1e3, 2),
        "max_ms": round(max(seconds) * 1e3, 2),
    }


def phase(
    b: Server, a: Server, admin: Server, options: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """b's requests beside the flood."""
    before = loads(admin)
    flood = Flood(a, options.adapters, options.width)
    lowest = [held(admin, "b")]
    most = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            lowest.append(held(admin, "b"))
            most.append(held(admin, "a"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    time.sleep(1.0)
    seconds = measure(b, options.requests, options.pause, seed)
    ended.set()
    watcher.join()
    flood.end()
    assert not flood.failed, flood.failed[0]
    after = loads(admin)
    return summary(seconds) | {
        "b_pages_lowest": min(lowest),
        "a_pages_most": max(most),
        "a_answers": flood.answered,
        "a_loads": sum(after[n] - before.get(n, 0) for n in after if n.startswith("a/")),
        "b_loads": after["b/main"] - before["b/main"],
    }


def loads(admin: Server) -> dict[str, int]:
    return {row["name"]: row["loads"] for row in admin.pool()["adapters"]}


def held(admin: Server, name: str) -> int:
    pages = admin.get("/graft/tenants").json()["tenants"][name]["pages"]
    return int(pages["held"])


def run(options: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="bench-tenants-"))
    model = tiny_model.save_model(folder / "model")
    tenant_world.save_adapters(folder / "root", options.adapters)
    world = tenant_world.World(folder / "tenants.yaml")
    cap = {} if options.cap == 0 else {"page_cap": options.cap}
    world.add("a", adapters=["a/*"], **cap)
    world.add("b", adapters=["b/*"], page_floor=options.floor)
    world.write()
    flags = ["--page-size", "16", "--max-total-tokens", str(POOL_PAGES * 16)]
    flags += ["--admin-api-key", tenant_world.ADMIN_KEY, "--graft-tenants", str(world.path)]
    flags += ["--graft-adapter-root", str(folder / "root")]
    with (
        serve(model, folder, *flags) as server,
        world.asking(server, "a") as a,
        world.asking(server, "b") as b,
        world.asking(server, "admin") as admin,
    ):
        measure(b, 20, 0.0, seed=1)  # code and caches are warm, and b holds its floor
        for number in range(options.adapters):  # each has been read once: cold, but not unread
            a.ask(Request(f"a/x{number}", tiny_model.prompt(8, seed=number), 1))
        measure(b, 20, 0.0, seed=100)
        quiet = summary(measure(b, options.requests, options.pause, seed=1_000))
        flooded = phase(b, a, admin, options, seed=2_000)
        again = summary(measure(b, options.requests, options.pause, seed=3_000))
        result = {"quiet": quiet, "flood": flooded, "quiet_again": again}
        if options.without:
            for tenant in world.tenants.values():
                tenant.pop("page_cap", None)
                tenant.pop("page_floor", None)
            changes = admin.get("/graft/tenants").json()["changes"]
            world.write()
            while admin.get("/graft/tenants").json()["changes"] == changes:
                time.sleep(0.2)
            result["flood_no_limits"] = phase(b, a, admin, options, seed=4_000)
    for name in ("flood", "flood_no_limits"):
        if name in result:
            ratio = result[name]["p99_ms"] / quiet["p99_ms"]
            result[name]["p99_over_quiet"] = round(ratio, 3)
    assert flooded["b_pages_lowest"] >= options.floor, flooded
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200, help="of b, in each phase")
    parser.add_argument("--adapters", type=int, default=50, help="cold ones of a")
    parser.add_argument("--width", type=int, default=50, help="a's requests under way")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between b's requests")
    parser.add_argument("--floor", type=int, default=60, help="b's pages of 160")
    parser.add_argument("--cap", type=int, default=24, help="a's pages of 160; 0 is none")
    parser.add_argument("--without", action="store_true", help="also without floor and cap")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    settings = {key: value for key, value in vars(options).items() if key not in ("json",)}
    result = {"settings": settings | {"pool_pages": POOL_PAGES}, **run(options)}
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
