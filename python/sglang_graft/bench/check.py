"""Predictions of the replay beside what was measured: Graft's units in a folder of results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_graft.bench.units import Load, Results
from sglang_graft.bench.warm import BURST
from sglang_graft.cache import Rates, policy_names
from sglang_graft.config import GraftConfig
from sglang_graft.sim.capacity import Model, predict
from sglang_graft.sim.compare import Options
from sglang_graft.sim.sizes import Sizes
from sglang_graft.sim.workloads import Workload

_NOT_READ = 1e15
"""Bytes a second of a disk that nobody reads: registering put every adapter into host memory."""


def check(folder: Path, h2d_bytes_per_s: float) -> Iterator[dict[str, Any]]:
    """A row for each measured unit with Graft: predicted and measured, and their relative errors.

    Times come from the unit's own warm-up, taken before its workload was played, never from the
    workload itself. ValueError when there is no such unit.
    """
    found = [result for result in Results(folder).read_some() if _is_modelled(result)]
    yield from (_row(result, h2d_bytes_per_s) for result in found)
    if not found:
        raise ValueError(f"--check: wanted measured units of graft peers in {folder}, found none")


def _is_modelled(result: dict[str, Any]) -> bool:
    """The replay has a host tier for weights and KV, or none; not one for weights alone."""
    peer = result["unit"]["peer"]
    own = peer["engine"] == "graft" and not peer["base_traffic"]
    return own and result["status"] == "measured" and "--graft-no-host-kv" not in peer["flags"]


def _row(result: dict[str, Any], h2d_bytes_per_s: float) -> dict[str, Any]:
    unit, figures = result["unit"], result["figures"]
    workload = Load(**unit["load"]).workload()
    guess = predict(workload, unit["budget_gb"], model_of(result, workload, h2d_bytes_per_s))
    measured = {key: 1e-3 * figures["ttft_ms"][key] for key in ("mean", "p50", "p99")}
    return {
        "unit": unit["key"],
        "predicted_s": guess["ttft_s"],
        "measured_s": measured,
        "error": {key: guess["ttft_s"][key] / measured[key] - 1 for key in measured},
        "predicted_hit_rate": guess["prefix_hit_rate"],
        "measured_hit_rate": figures["prefix_hit_rate"],
        "predicted_loads": guess["adapter_loads"],
        "measured_loads": result["moved"].get("loads"),
    }


def model_of(result: dict[str, Any], workload: Workload, h2d_bytes_per_s: float) -> Model:
    """The replay's model of one unit's server under its workload."""
    flags, warm = result["unit"]["peer"]["flags"], result["warm"]
    sizes = Sizes(**result["sizes"])
    policy = next((flag for flag in flags if flag in policy_names()), GraftConfig().policy)
    weights = sum(sizes.adapter_pages(rank) * sizes.page_bytes for _, rank in result["adapters"])
    host = result["host_bytes"]
    disk = _NOT_READ if weights <= host else Rates().disk_bytes_per_s
    rates = Rates(
        h2d_bytes_per_s=h2d_bytes_per_s,
        disk_bytes_per_s=disk,
        prefill_s_per_token=max(warm["prefill_s_per_token"], 1e-9),
        prefill_s_per_token_pair=warm["prefill_s_per_token_pair"],
    )
    options = Options(
        host_gb=host / 1e9,
        prefetch="--graft-no-prefetch" not in flags,
        sizes=sizes,
        rates=rates,
        decode_s_per_token=decode_seconds(
            warm["decode_s_per_token_alone"], warm["decode_s_per_token_burst"], workload
        ),
    )
    return Model(options=options, policy=policy, overhead_s=warm["overhead_s"])


def decode_seconds(alone: float, burst: float, workload: Workload) -> float:
    """Seconds a token of a request that decodes beside as many others as there are on average.

    A step is taken to grow evenly from `alone` to `burst`, as measured for one and for BURST
    requests. By Little's law there are rate * tokens * seconds a token of them, so the seconds
    follow; they are at most those of the burst.
    """
    ready: list[float] = []
    for request in workload.requests:
        after = request.arrival_s if request.previous is None else ready[request.previous]
        ready.append(after + request.think_s)
    tokens = sum(request.output.length for request in workload.requests)
    each = max(burst - alone, 0.0) / (BURST - 1)
    crowd = each * tokens / max(ready) if max(ready) > 0 else 1.0
    return min(alone / (1 - crowd), burst) if crowd < 1 else max(burst, alone)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median and largest size of the relative errors."""
    found = {}
    for figure in ("mean", "p50", "p99"):
        errors = [abs(row["error"][figure]) for row in rows]
        found[f"{figure}_median"] = statistics.median(errors)
        found[f"{figure}_largest"] = max(errors)
    return found
