"""What scraping costs the scheduler: CPU time of its loop a pass, `/metrics` read and not read.

    python benchmark/serving/bench_metrics.py --json OUT [--rounds 14] [--seconds 1] [--hz 20]

One CPU server with the tiny model of the tests, whose passes are as short as passes get, under a
constant load of eight streams. Wall time of a pass is whatever else the machine does; so the figure
is the time that the loop's own thread was on a CPU (/proc, in ns). A scrape a second is less than
can be seen in it; so it is read `hz` times as often, and the difference divided by `hz`: what a
scrape costs does not depend on when the next one comes.

A round has eight short windows in two blocks of A B B A, in turns first one and then the other:

- `scraped`: A without scraping, B with it;
- `control`: neither is scraped. What it finds is the resolution of the whole.

The relative difference (B - A) / A of a block cancels what drifts evenly. Results are medians over
the rounds, with the interval that holds the true median with 95 % (of order statistics; no
distribution is assumed). `cost_at_1_hz` is to be compared with 0.02; it is shown when the upper end
of `scraped` is below 0.02 x `hz`, and `control` holds 0.

What this does not show: a GPU's passes, in which the CPU has less to do; thousands of adapters (an
answer grows with their number; --adapters says how many). The accounting is always on, so there is
nothing to compare it with: `accounting` has its cost a call, measured alone, and `accounting_share`
what one call of each would be of a pass.
"""

import argparse
import json
import math
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
import timeit
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
STREAMS, PROMPT, NEW = 8, 48, 512
ANSWERS = "graft_scheduler_answer_seconds"
PASSES = "graft_scheduler_pass_seconds"


def read(url: str) -> dict[str, float]:
    """The samples without labels of one scrape."""
    from prometheus_client.parser import text_string_to_metric_families

    text = httpx.get(f"{url}/metrics", timeout=60).text
    families = text_string_to_metric_families(text)
    return {s.name: s.value for family in families for s in family.samples if not s.labels}


def keep_busy(url: str, names: list[str], stop: threading.Event, seed: int) -> None:
    source = random.Random(seed)
    with httpx.Client(timeout=120) as client:
        while not stop.is_set():
            body = {
                "input_ids": [source.randrange(500) for _ in range(PROMPT)],
                "lora_path": source.choice(names),
                "sampling_params": {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True},
            }
            client.post(f"{url}/generate", json=body).raise_for_status()


def scrape(url: str, rate: float, ends: float) -> int:
    """Read `/metrics` at `rate` Hz until `ends`, less often where that cannot be; how often."""
    done, due = 0, time.monotonic()
    with httpx.Client(timeout=60) as client:
        while (now := time.monotonic()) < ends:
            if now < due:
                time.sleep(min(due, ends) - now)
                continue
            client.get(f"{url}/metrics").raise_for_status()
            done, due = done + 1, max(due + 1 / rate, time.monotonic())
    return done


def on_cpu(pid: int) -> int:
    """Nanoseconds for which the main thread of a process was on a CPU: the scheduler's loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])


def window(url: str, pid: int, rate: float, seconds: float) -> dict[str, float]:
    """Figures of one window. The readings around it are the same whether it is scraped or not."""
    before, cpu = read(url), on_cpu(pid)
    begun = time.monotonic()
    scrapes = scrape(url, rate, begun + seconds) if rate else 0
    time.sleep(max(0.0, begun + seconds - time.monotonic()))
    took, used, after = time.monotonic() - begun, on_cpu(pid) - cpu, read(url)
    passes = after[PASSES + "_count"] - before[PASSES + "_count"]
    # One of the readings around is in these sums, too.
    answers = after[ANSWERS + "_count"] - before[ANSWERS + "_count"]
    return {
        "hz": scrapes / took,
        "passes": passes,
        "cpu_ms": 1e-6 * used / passes,
        "wall_ms": 1e3 * (after[PASSES + "_sum"] - before[PASSES + "_sum"]) / passes,
        "answer_ms": 1e3 * (after[ANSWERS + "_sum"] - before[ANSWERS + "_sum"]) / answers,
    }


def block(url: str, pid: int, rate: float, seconds: float) -> dict[str, float]:
    """A B B A, where B is scraped at `rate` Hz: figures of both, and how they differ."""
    a, b, more_b, more_a = (window(url, pid, hz, seconds) for hz in (0, rate, rate, 0))
    quiet, loud = ({k: (x[k] + y[k]) / 2 for k in x} for x, y in ((a, more_a), (b, more_b)))
    return {
        "hz": loud["hz"],
        "answer_ms": loud["answer_ms"],
        "passes": 2 * (quiet["passes"] + loud["passes"]),
        "cpu_ms": quiet["cpu_ms"],
        "cpu_difference": loud["cpu_ms"] / quiet["cpu_ms"] - 1,
        "wall_ms": quiet["wall_ms"],
        "wall_difference": loud["wall_ms"] / quiet["wall_ms"] - 1,
    }


def interval(values: list[float]) -> dict[str, float]:
    """The median, and the order statistics that hold the true one with 95 %."""
    ordered, count = sorted(values), len(values)
    # The number of values below the true median is binomial (count, 1/2).
    below, rank = 0.5**count, 0
    while below <= 0.025:
        rank += 1
        below += math.comb(count, rank) * 0.5**count
    low = max(0, rank - 1)
    return {
        "median": statistics.median(ordered),
        "low": ordered[low],
        "high": ordered[count - 1 - low],
    }


def accounting() -> dict[str, float]:
    """Nanoseconds a call of what is noted whether anybody scrapes or not."""
    from sglang_graft.cache import Departures, Reason
    from sglang_graft.engine.observe import Observations

    seen, departures, times = Observations(), Departures(now=time.time), 200_000

    def note() -> None:
        departures.note(1, Reason.REQUEST, "a", 3, weights=False, kept=True)

    calls = {
        "pass": lambda: seen.begin_pass(busy=True),
        "admission": lambda: seen.admitted("r", has_adapter=True),
        "departure": note,
    }
    best = {name: min(timeit.repeat(f, number=times, repeat=5)) for name, f in calls.items()}
    return {name: 1e9 * seconds / times for name, seconds in best.items()}


def summary(blocks: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds, and what they say about a scrape a second."""
    found: dict[str, Any] = {}
    for kind, rows in blocks.items():
        found[kind] = {
            name: interval([row[name] for row in rows])
            for name in ("cpu_difference", "wall_difference")
        }
        found[kind]["cpu_ms_a_pass"] = statistics.median(row["cpu_ms"] for row in rows)
    hz = statistics.median(row["hz"] for row in blocks["scraped"])
    cost = {k: x / hz for k, x in found["scraped"]["cpu_difference"].items()}
    control = found["control"]["cpu_difference"]
    return found | {
        "hz": hz,
        "answer_ms": statistics.median(row["answer_ms"] for row in blocks["scraped"]),
        "cost_at_1_hz": cost,
        "resolution_at_1_hz": max(abs(control["low"]), abs(control["high"])) / hz,
        "control_holds_0": control["low"] <= 0 <= control["high"],
    }


def load(url: str, pid: int, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """All blocks under a constant load."""
    stop = threading.Event()
    streams = [
        threading.Thread(target=keep_busy, args=(url, names, stop, seed)) for seed in range(STREAMS)
    ]
    for stream in streams:
        stream.start()
    window(url, pid, options.hz, 4.0)  # code and caches are warm
    blocks: dict[str, list[dict[str, float]]] = {"scraped": [], "control": []}
    rates = {"scraped": options.hz, "control": 0.0}
    for turn in range(options.rounds):
        for kind in sorted(rates, reverse=bool(turn % 2)):
            blocks[kind].append(block(url, pid, rates[kind], options.seconds))
    stop.set()
    for stream in streams:
        stream.join()
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a window")
    parser.add_argument("--hz", type=float, default=20.0, help="how often a window is scraped")
    parser.add_argument("--adapters", type=int, default=16)
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "test/integration"), str(ROOT / "test")]
    import tiny_adapters
    import tiny_model
    from harness import serve

    before = psutil.getloadavg()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model.save_model(folder / "model")
        names = [f"a{number}" for number in range(options.adapters)]
        adapters = tiny_adapters.save_ranks(folder, dict.fromkeys(names, 8))
        flags = ("--page-size", "16", "--max-total-tokens", "32768")
        with serve(model, folder, *flags, adapters=adapters) as server:
            children = psutil.Process(server.pid).children(recursive=True)
            (process,) = [c for c in children if "scheduler" in " ".join(c.cmdline())]
            blocks = load(server.url, process.pid, names, options)
    found, calls = summary(blocks), accounting()
    result: dict[str, Any] = {
        "what": "CPU time of the scheduler's loop a pass, /metrics scraped and not; tiny model",
        "python": platform.python_version(),
        "cpus": psutil.cpu_count(),
        "load_average_before": before,
        "load_average_after": psutil.getloadavg(),
        "adapters": options.adapters,
        "streams": STREAMS,
        "window_seconds": options.seconds,
        "rounds": options.rounds,
        "summary": found,
        "accounting_ns": calls,
        "accounting_share": sum(calls.values()) * 1e-6 / found["control"]["cpu_ms_a_pass"],
        "blocks": blocks,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: result[k] for k in ("summary", "accounting_share")}, indent=1))


if __name__ == "__main__":
    main()
