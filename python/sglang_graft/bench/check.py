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
from sglang_graft.sim.capacity import Model, play, spread
from sglang_graft.sim.compare import Options
from sglang_graft.sim.sizes import Sizes
from sglang_graft.sim.steps import Served, Steps
from sglang_graft.sim.workloads import Workload

_NOT_READ = 1e15
"""Bytes a second of a disk that nobody reads: registering put every adapter into host memory."""
_SHORTEST_S = 1e-9
"""A fit or a difference of clocks may come to 0, and nothing takes that long."""


def check(
    folder: Path, h2d_bytes_per_s: float, read_bytes_per_s: float
) -> Iterator[dict[str, Any]]:
    """A row for each measured unit with Graft: predicted and measured, and their relative errors.

    Times of forwards come from the unit's own warm-up, taken before its workload was played, never
    from the workload itself; bandwidths are given: of the link, and of the GPU's memory. ValueError
    when there is no such unit.
    """
    found = [result for result in Results(folder).read_some() if _is_modelled(result)]
    yield from (_row(result, h2d_bytes_per_s, read_bytes_per_s) for result in found)
    if not found:
        raise ValueError(f"--check: wanted measured units of graft peers in {folder}, found none")


def _is_modelled(result: dict[str, Any]) -> bool:
    """The replay has a host tier for weights and KV, or none; not one for weights alone."""
    peer = result["unit"]["peer"]
    own = peer["engine"] == "graft" and not peer["base_traffic"]
    return own and result["status"] == "measured" and "--graft-no-host-kv" not in peer["flags"]


def _row(result: dict[str, Any], h2d_bytes_per_s: float, read_bytes_per_s: float) -> dict[str, Any]:
    """Requests that were sent are compared: those that a unit's end left out came late, to a
    server with less to do."""
    unit, figures = result["unit"], result["figures"]
    workload = Load(**unit["load"]).workload()
    model = model_of(result, h2d_bytes_per_s, read_bytes_per_s)
    served, totals = play(workload, unit["budget_gb"], model)
    sent, ttft = result["records"]["index"], served.ttft_s()
    guess = spread([ttft[index] for index in sent])
    measured = {key: 1e-3 * figures["ttft_ms"][key] for key in guess}
    return {
        "unit": unit["key"],
        "predicted_s": guess,
        "measured_s": measured,
        "error": {key: guess[key] / measured[key] - 1 for key in measured},
        "predicted_token_s": _token_s(served, workload, sent),
        "measured_token_s": 1e-3 * figures["tpot_ms"]["mean"],
        "predicted_hit_rate": sum(served.cached[index] for index in sent)
        / sum(workload.requests[index].prompt_tokens for index in sent),
        "measured_hit_rate": figures["prefix_hit_rate"],
        "predicted_loads": totals.adapter_loads,
        "measured_loads": result["moved"].get("loads"),
    }


def _token_s(served: Served, workload: Workload, sent: list[int]) -> float:
    """Mean over requests of the mean time for a token after the first."""
    after = [(index, workload.requests[index].output.length - 1) for index in sent]
    times = [(served.end_s[i] - served.first_s[i]) / more for i, more in after if more]
    return statistics.fmean(times)


def model_of(result: dict[str, Any], h2d_bytes_per_s: float, read_bytes_per_s: float) -> Model:
    """The model of one unit's server."""
    flags, warm = result["unit"]["peer"]["flags"], result["warm"]
    sizes = Sizes(**result["sizes"])
    policy = next((flag for flag in flags if flag in policy_names()), GraftConfig().policy)
    weights = sum(sizes.adapter_pages(rank) * sizes.page_bytes for _, rank in result["adapters"])
    host = result["host_bytes"]
    disk = _NOT_READ if weights <= host else Rates().disk_bytes_per_s
    rates = Rates(
        h2d_bytes_per_s=h2d_bytes_per_s,
        disk_bytes_per_s=disk,
        prefill_s_per_token=max(warm["prefill_s_per_token"], _SHORTEST_S),
        prefill_s_per_token_pair=warm["prefill_s_per_token_pair"],
    )
    options = Options(
        host_gb=host / 1e9,
        prefetch="--graft-no-prefetch" not in flags,
        sizes=sizes,
        rates=rates,
    )
    return Model(options=options, policy=policy, steps=steps_of(warm, read_bytes_per_s))


def steps_of(warm: dict[str, Any], read_bytes_per_s: float) -> Steps:
    """Forwards from a warm-up: a constant beside the prompt's tokens is the forward's, and a decode
    step grows evenly from one request to BURST of them."""
    alone, burst = warm["decode_s_per_token_alone"], warm["decode_s_per_token_burst"]
    return Steps(
        prefill_s=warm["overhead_s"],
        decode_s=max(alone, _SHORTEST_S),
        decode_s_per_request=max(burst - alone, 0.0) / (BURST - 1),
        read_bytes_per_s=read_bytes_per_s,
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median and largest size of the relative errors."""
    found = {}
    for figure in ("mean", "p50", "p99"):
        errors = [abs(row["error"][figure]) for row in rows]
        found[f"{figure}_median"] = statistics.median(errors)
        found[f"{figure}_largest"] = max(errors)
    return found
