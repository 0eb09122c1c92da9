"""What scraping costs the scheduler: its pass time with `/metrics` read at 1 Hz and 5 Hz.

    python benchmark/serving/bench_metrics.py --json OUT [--rounds 6] [--seconds 6]

One CPU server with the tiny model of the tests, whose passes are as short as passes get, under a
constant load of eight streams over its adapters. Each round has a phase of each rate, in an order
that rotates; figures of a phase are compared with those of the same round without scraping, and the
ratios' median over the rounds is the result. `none again` is a second phase without scraping: how
far its ratio is from 1, and how far the least and the most are apart, is what the machine alone
does. A cost smaller than that is not resolved by `wall` and `cpu`. Of each phase:

- `wall`: mean time of a scheduler pass (the next one's beginning minus its own), which has
  everything in it: the message, the answer, and what else the machine does;
- `cpu`: CPU time of the scheduler process a pass, which other processes disturb less;
- `answer`: share of the pass time that the scheduler spent on computing answers, its own figure.
  It leaves out receiving the question and sending the answer, so it is a lower bound.

What this does not show: a GPU's passes, in which the CPU has less to do; thousands of adapters
(`answer` grows with their number; --adapters says how many); and the accounting itself, which is
always on: `accounting` has its cost a call, measured alone.
"""

import argparse
import json
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
PHASES = {"none": 0, "1 Hz": 1, "5 Hz": 5, "none again": 0}
STREAMS, PROMPT, NEW = 8, 48, 64
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


def scrape(url: str, rate: int, ends: float) -> int:
    """Read `/metrics` at `rate` Hz until `ends`; how often that was."""
    done, due = 0, time.monotonic()
    with httpx.Client(timeout=60) as client:
        while due < ends:
            time.sleep(max(0.0, due - time.monotonic()))
            client.get(f"{url}/metrics").raise_for_status()
            done += 1
            due += 1 / rate
    return done


def phase(url: str, process: psutil.Process, rate: int, seconds: float) -> dict[str, float]:
    """Figures of one phase, from counters before and after it."""
    before, cpu = read(url), process.cpu_times()
    ends = time.monotonic() + seconds
    scrapes = scrape(url, rate, ends) if rate else 0
    time.sleep(max(0.0, ends - time.monotonic()))
    later, after = process.cpu_times(), read(url)
    passes = after[PASSES + "_count"] - before[PASSES + "_count"]
    wall = after[PASSES + "_sum"] - before[PASSES + "_sum"]
    used = later.user + later.system - cpu.user - cpu.system
    # The second of our own readings is in neither sum; the first one is in `after`.
    answers = after[ANSWERS + "_count"] - before[ANSWERS + "_count"]
    spent = after[ANSWERS + "_sum"] - before[ANSWERS + "_sum"]
    return {
        "rate_hz": rate,
        "passes": passes,
        "scrapes": scrapes,
        "wall_ms": 1e3 * wall / passes,
        "cpu_ms": 1e3 * used / passes,
        "answer_ms": 1e3 * spent / answers,
        "answer_share": spent * scrapes / answers / wall,
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


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """For each phase: the ratios to the first one without scraping, over the rounds."""
    found: dict[str, dict[str, float]] = {}
    for name in PHASES:
        row = {"answer_share": statistics.median(phases[name]["answer_share"] for phases in rounds)}
        for kind in ("wall", "cpu"):
            ratios = [p[name][f"{kind}_ms"] / p["none"][f"{kind}_ms"] for p in rounds]
            row |= {
                f"{kind}_ratio": statistics.median(ratios),
                f"{kind}_ratio_least": min(ratios),
                f"{kind}_ratio_most": max(ratios),
            }
        found[name] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--adapters", type=int, default=16)
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "test/integration"), str(ROOT / "test")]
    import tiny_adapters
    import tiny_model
    from harness import serve

    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model.save_model(folder / "model")
        names = [f"a{number}" for number in range(options.adapters)]
        adapters = tiny_adapters.save_ranks(folder, dict.fromkeys(names, 8))
        flags = ("--page-size", "16", "--max-total-tokens", "32768")
        with serve(model, folder, *flags, adapters=adapters) as server:
            children = psutil.Process(server.pid).children(recursive=True)
            (process,) = [c for c in children if "scheduler" in " ".join(c.cmdline())]
            stop = threading.Event()
            streams = [
                threading.Thread(target=keep_busy, args=(server.url, names, stop, seed))
                for seed in range(STREAMS)
            ]
            for stream in streams:
                stream.start()
            phase(server.url, process, 0, options.seconds)  # warm-up
            for turn in range(options.rounds):
                order = list(PHASES)[turn % 4 :] + list(PHASES)[: turn % 4]
                url, seconds = server.url, options.seconds
                rounds.append({n: phase(url, process, PHASES[n], seconds) for n in order})
            stop.set()
            for stream in streams:
                stream.join()
    result: dict[str, Any] = {
        "what": "scheduler pass time with /metrics scraped, against none, CPU, tiny model",
        "python": platform.python_version(),
        "cpus": psutil.cpu_count(),
        "load_average": psutil.getloadavg(),
        "adapters": options.adapters,
        "streams": STREAMS,
        "phase_seconds": options.seconds,
        "summary": summary(rounds),
        "accounting_ns": accounting(),
        "rounds": rounds,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("summary", "accounting_ns")}, indent=1))


if __name__ == "__main__":
    main()
