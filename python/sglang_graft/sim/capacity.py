"""What hardware a workload needs, by replaying it: budget, host memory and replicas for a goal.

Times are those of `steps`: one GPU a replica, one forward at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from sglang_graft.sim.compare import Bench, Options
from sglang_graft.sim.replay import Totals
from sglang_graft.sim.routing import router
from sglang_graft.sim.schedule import Schedule, Server, check_room
from sglang_graft.sim.steps import Served, Steps, serve
from sglang_graft.sim.trace import Trace
from sglang_graft.sim.workloads import Request, Workload

Figure = Literal["mean", "p50", "p99"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """`figure` of the time to the first token, at most `ttft_s`."""

    ttft_s: float = 0.5
    figure: Figure = "mean"

    def __post_init__(self) -> None:
        if not self.ttft_s > 0:
            raise ValueError(f"--goal-ms: wanted more than 0, got {1e3 * self.ttft_s}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """How a replica is modelled; `options.decode_s_per_token` is not looked at."""

    options: Options = field(default_factory=Options)
    policy: str = "cost"
    routing: str = "affinity"
    steps: Steps = field(default_factory=Steps)


def play(workload: Workload, budget_gb: float, model: Model) -> tuple[Served, Totals]:
    """One replica. ValueError when a request does not fit the budget."""
    trace = Trace(workload, model.options.sizes)
    server = Server(pages=trace.sizes.pages(budget_gb), rates=model.options.rates)
    check_room(trace, server)
    run = Bench(trace, server, Schedule(), model.options).prepared(model.policy)
    return serve(run, model.steps), run.totals


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and P99."""
    p50, p99 = np.percentile(seconds, (50, 99)).tolist()
    return {"mean": float(np.mean(seconds)), "p50": p50, "p99": p99}


def predict(
    workload: Workload, budget_gb: float, model: Model, replicas: int = 1
) -> dict[str, Any]:
    """TTFT and hit rate of `workload` on `replicas` devices with `budget_gb` each.

    ValueError when a request does not fit the budget.
    """
    ttft: list[float] = []
    found = dict.fromkeys(("prompt_tokens", "cached_tokens", "adapter_loads", "disk_reads"), 0)
    busiest = 0
    for part in shares(workload, replicas, model.routing):
        if not part.requests:
            continue
        served, totals = play(part, budget_gb, model)
        ttft += served.ttft_s()
        found["prompt_tokens"] += totals.prompt_tokens
        found["cached_tokens"] += totals.device_tokens + totals.host_tokens
        found["adapter_loads"] += totals.adapter_loads
        found["disk_reads"] += totals.disk_reads
        busiest = max(busiest, totals.requests)
    return {
        "budget_gb": budget_gb,
        "host_gb": model.options.host_gb,
        "replicas": replicas,
        "ttft_s": spread(ttft),
        "prefix_hit_rate": found["cached_tokens"] / found["prompt_tokens"],
        "busiest_over_mean": busiest * replicas / len(ttft),
        **found,
    }


def shares(workload: Workload, replicas: int, routing: str) -> list[Workload]:
    """What each replica gets. Conversations stay together; loads count conversations so far."""
    choose = router(routing, replicas=replicas, adapters=len(workload.adapters), seed=workload.seed)
    loads, chosen = [0] * replicas, [0] * len(workload.requests)
    parts: list[list[Request]] = [[] for _ in range(replicas)]
    places = [0] * len(workload.requests)
    for index, request in enumerate(workload.requests):
        if request.previous is None:
            own = choose(request.adapter, loads, sum(loads))
            loads[own] += 1
        else:
            own = chosen[request.previous]
            request = replace(request, previous=places[request.previous])
        chosen[index], places[index] = own, len(parts[own])
        parts[own].append(request)
    return [
        Workload(workload.name, workload.seed, workload.adapters, tuple(part)) for part in parts
    ]


def plan(
    workload: Workload,
    budgets_gb: Sequence[float],
    hosts_gb: Sequence[float],
    replicas: Sequence[int],
    goal: Goal,
    model: Model,
) -> Iterator[dict[str, Any]]:
    """A row for each choice, cheapest first: fewest replicas, then least device memory, then least
    host memory. `met` says whether it reaches the goal; `problem` why it cannot be tried. No more
    replicas are tried than the goal needs.

    ValueError for an unknown routing.
    """
    router(model.routing, replicas=1, adapters=1, seed=0)
    for count in sorted(set(replicas)):
        met = False
        for budget in sorted(set(budgets_gb)):
            for host in sorted(set(hosts_gb)):
                here = replace(model, options=replace(model.options, host_gb=host))
                try:
                    row = predict(workload, budget, here, count)
                except ValueError as error:
                    row = {"budget_gb": budget, "host_gb": host, "replicas": count, "met": False}
                    yield row | {"problem": str(error)}
                    continue
                row["met"] = row["ttft_s"][goal.figure] <= goal.ttft_s
                met = met or row["met"]
                yield row | {"problem": ""}
        if met:
            return
