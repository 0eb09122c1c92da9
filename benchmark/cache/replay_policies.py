"""How near is each policy to the best possible, on every workload of the protocol?

    python benchmark/cache/replay_policies.py            # replays everything, about 15 minutes
    python benchmark/cache/replay_policies.py --resume   # only what the results lack
    python benchmark/cache/replay_policies.py --tables   # only writes the tables anew
    python benchmark/cache/replay_policies.py --check    # fails when the tables are out of date

The rows go to results/replay.json, the tables to docs/replay.md. No GPU is needed; times are
modelled (docs/replay.md says how).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_graft.sim.compare import (
    DEFAULT_BUDGETS,
    DEFAULT_HOST_GB,
    Options,
    compare,
)
from sglang_graft.sim.workloads import GENERATORS, Size

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results/replay.json"
PAGE = ROOT / "docs/replay.md"
BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->\n"
REQUESTS = 1200
SEEDS = (0, 1, 2)
POLICIES = ("cost", "lru", "elora")

Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A table: what is replayed, under which name its rows are kept."""

    name: str
    policies: tuple[str, ...]
    options: Options
    seeds: tuple[int, ...] = (0,)
    budgets: tuple[float, ...] = DEFAULT_BUDGETS
    rate: float | None = None
    workloads: tuple[str, ...] = tuple(GENERATORS)


STUDIES = (
    Study("main", POLICIES, Options(), SEEDS),
    Study("small host", POLICIES, Options(host_gb=16)),
    Study("no host tier", POLICIES, Options(host_gb=0)),
    Study("no dependency rule", ("cost",), Options(dependency_rule=False)),
    Study("no prefetch", ("cost",), Options(prefetch=False)),
    Study("idle promotion", ("cost", "lru"), Options(idle_promotion=True)),
    Study("agents, twice the rate", POLICIES, Options(), SEEDS, rate=1.0, workloads=("agents",)),
)


def replayed(kept: list[Row]) -> Iterator[list[Row]]:
    """The rows of every case in order; `kept` has some of them already."""
    for study in STUDIES:
        for workload in study.workloads:
            for seed in study.seeds:
                found = select(kept, study=study.name, workload=workload, seed=seed)
                yield found or list(_case(study, workload, seed))
        print(f"{study.name}: done", file=sys.stderr, flush=True)


def _case(study: Study, workload: str, seed: int) -> Iterator[Row]:
    size = Size(requests=REQUESTS, rate=study.rate)
    for row in compare(
        workload, study.policies, study.budgets, seed=seed, size=size, options=study.options
    ):
        yield {"study": study.name, **row}


def replay_all(kept: list[Row]) -> None:
    """Write the results after each case, so that a run that was stopped can be resumed."""
    rows: list[Row] = []
    for case in replayed(kept):
        rows += case
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


def load() -> list[Row]:
    """The committed rows."""
    found: list[Row] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def mean(rows: Iterable[Row], key: str) -> float:
    return float(statistics.mean(row[key] for row in rows))


def select(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def ratios(rows: list[Row], study: str) -> Iterator[str]:
    """cost / optimum by workload and budget: mean over seeds, and the worst seed of `cost`."""
    kept = select(rows, study=study)
    policies = list(dict.fromkeys(row["policy"] for row in kept))
    heads = " | ".join(policies)
    yield f"| workload | GB | running, at most | {heads} | cost / lru | TTFT ms |"
    yield "|---|---|---|" + "---|" * (len(policies) + 2)
    for workload in dict.fromkeys(row["workload"] for row in kept):
        for budget in dict.fromkeys(row["budget_gb"] for row in kept):
            here = select(kept, workload=workload, budget_gb=budget)
            own = {name: select(here, policy=name) for name in policies}
            cells = [f"{mean(own[name], 'ratio'):.3f}" for name in policies]
            if len(own["cost"]) > 1:
                cells[policies.index("cost")] += f" ({max(r['ratio'] for r in own['cost']):.3f})"
            relative = mean(own["cost"], "cost_seconds") / mean(own["lru"], "cost_seconds")
            times = [
                f"{1e3 * mean(own[name], 'ttft_mean_s'):.1f}" for name in POLICIES if name in own
            ]
            yield (
                f"| {workload} | {budget:g} | {mean(here, 'held_share'):.0%} | "
                + " | ".join(cells)
                + f" | {relative:.3f} | {' / '.join(times)} |"
            )


def ablations(rows: list[Row]) -> Iterator[str]:
    """Each part of the design switched off, policy cost, seed 0."""
    yield (
        "| workload | GB | the server's: s, TTFT ms | no host tier: s, TTFT | no dependency rule: "
        "s, TTFT, invalid KV | no prefetch: TTFT |"
    )
    yield "|---|---|---|---|---|---|"
    for workload in GENERATORS:
        for budget in DEFAULT_BUDGETS:
            key = {"workload": workload, "budget_gb": budget, "policy": "cost", "seed": 0}
            main, host, rule, fetch = (
                select(rows, study=study, **key)[0]
                for study in ("main", "no host tier", "no dependency rule", "no prefetch")
            )
            invalid = rule["invalid_kv_pages"] / max(1, rule["sampled_kv_pages"])
            yield (
                f"| {workload} | {budget:g} | {pair(main)} | {pair(host)} | "
                f"{pair(rule)}, {invalid:.0%} | {1e3 * fetch['ttft_mean_s']:.1f} |"
            )


def idle(rows: list[Row]) -> Iterator[str]:
    """Without and with idle promotion, seed 0."""
    yield "| workload | GB | lru: s, TTFT ms | with | copied for it, GB | cost: s, TTFT | with |"
    yield "|---|---|---|---|---|---|---|"
    for workload in GENERATORS:
        for budget in DEFAULT_BUDGETS:
            cells = []
            for policy in ("lru", "cost"):
                key = {"workload": workload, "budget_gb": budget, "policy": policy, "seed": 0}
                off, on = (select(rows, study=s, **key)[0] for s in ("main", "idle promotion"))
                cells += [pair(off), pair(on)]
                if policy == "lru":
                    cells.append(f"{on['idle_bytes'] / 1e9:.1f}")
            yield f"| {workload} | {budget:g} | {' | '.join(cells)} |"


def pair(row: Row) -> str:
    return f"{row['cost_seconds']:.2f}, {1e3 * row['ttft_mean_s']:.1f}"


def tables(rows: list[Row]) -> str:
    lines = ["", f"### Host tier of {DEFAULT_HOST_GB:g} GB", "", *ratios(rows, "main")]
    lines += ["", "### No host tier, one seed", "", *ratios(rows, "no host tier")]
    lines += ["", "### Host tier of 16 GB, one seed", "", *ratios(rows, "small host")]
    lines += ["", "### agents at twice the rate", "", *ratios(rows, "agents, twice the rate")]
    lines += ["", "### Parts switched off, policy cost, seed 0", "", *ablations(rows)]
    lines += ["", "### Idle promotion, seed 0", "", *idle(rows), ""]
    return "\n".join(lines) + "\n"


def page(text: str, rows: list[Row]) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{PAGE}: wanted the lines {BEGIN.strip()} and {END.strip()}")
    return before + begin + tables(rows) + end + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--resume", action="store_true", help="replay only what the results lack")
    only.add_argument("--tables", action="store_true", help="write docs/replay.md from the results")
    only.add_argument("--check", action="store_true", help="compare docs/replay.md with them")
    args = parser.parse_args()
    if not (args.tables or args.check):
        replay_all(load() if args.resume else [])
    old = PAGE.read_text(encoding="utf-8")
    new = page(old, load())
    if args.check and new != old:
        sys.exit(f"{PAGE.relative_to(ROOT)} is out of date: run benchmark/cache/replay_policies.py")
    if not args.check:
        PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
