"""Predictions beside measurements: canned results of a server that behaves as the model says."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from sglang_graft.bench.check import check, model_of, steps_of, summary
from sglang_graft.bench.peers import parse_peers
from sglang_graft.bench.units import Load, Results, Unit
from sglang_graft.bench.warm import BURST
from sglang_graft.sim.capacity import play, spread
from sglang_graft.sim.steps import Steps

LOAD = Load(name="chat", rate=4.0, seconds=5.0, adapters=4)
ANSWER = 64
"""Tokens of each answer of chat."""
H2D, READ = 50.7e9, 4.8e12
SIZES = {"kv_bytes_per_token": 768, "adapter_bytes_per_rank": 18048, "page_tokens": 64}


def canned(label: str, factor: float) -> tuple[Unit, dict[str, Any]]:
    """A unit whose server was `factor` times as slow as predicted."""
    unit = Unit(peer=parse_peers([label])[0], load=LOAD, budget_gb=0.02)
    workload = LOAD.workload()
    result: dict[str, Any] = {
        "status": "measured",
        "sizes": SIZES,
        "host_bytes": 100_000_000,
        "adapters": [[a.name, a.rank] for a in workload.adapters],
        "warm": {
            "overhead_s": 0.01,
            "prefill_s_per_token": 4e-5,
            "prefill_s_per_token_pair": 0.0,
            "decode_s_per_token_alone": 0.01,
            "decode_s_per_token_burst": 0.02,
        },
        "moved": {"loads": 4},
    }
    served, _ = play(workload, 0.02, model_of(result | {"unit": unit.describe()}, H2D, READ))
    # Its end left out the requests that came last.
    sent = [i for i, ready in enumerate(served.ready_s) if ready < LOAD.seconds]
    assert 0 < len(sent) < len(workload.requests)
    ttft = served.ttft_s()
    guess = spread([ttft[i] for i in sent])
    token_s = [(served.end_s[i] - served.first_s[i]) / (ANSWER - 1) for i in sent]
    result["records"] = {"index": sent}
    result["figures"] = {
        "ttft_ms": {key: 1e3 * factor * value for key, value in guess.items()},
        "tpot_ms": {"mean": 1e3 * factor * fmean(token_s)},
        "prefix_hit_rate": sum(served.cached[i] for i in sent)
        / sum(workload.requests[i].prompt_tokens for i in sent),
    }
    return unit, result


def test_errors_are_relative_to_what_was_measured(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for label, factor in (("graft:cost", 2.0), ("graft:lru+no-prefetch", 1.0), ("stock:2", 9.0)):
        results.write(*canned(label, factor))
    results.write(*canned("graft:cost+no-host-kv", 5.0))  # not modelled
    found = {row["unit"]: row for row in check(tmp_path, H2D, READ)}
    assert len(found) == 2
    cost = next(row for key, row in found.items() if "graft-cost" in key)
    assert cost["error"]["mean"] == pytest.approx(-0.5)
    assert cost["predicted_token_s"] == pytest.approx(cost["measured_token_s"] / 2)
    assert cost["predicted_hit_rate"] == pytest.approx(cost["measured_hit_rate"])
    assert cost["measured_loads"] == cost["predicted_loads"] == 4
    errors = summary(list(found.values()))
    assert errors["mean_largest"] == pytest.approx(0.5)
    assert errors["mean_median"] == pytest.approx(0.25)


def test_the_model_is_that_of_the_units_server() -> None:
    unit, result = canned("graft:elora+no-prefetch", 1.0)
    result["unit"] = unit.describe()
    model = model_of(result, 1e9, READ)
    assert (model.policy, model.options.prefetch) == ("elora", False)
    assert model.options.rates.h2d_bytes_per_s == 1e9
    # Every adapter fits into host memory, where it was put when it was registered.
    assert model.options.rates.read_seconds(1e9) < 1e-3
    small = model_of(result | {"host_bytes": 1000}, 1e9, READ)
    assert small.options.rates.disk_bytes_per_s == 2e9


def test_forwards_are_those_of_the_warm_up() -> None:
    warm = {"overhead_s": 0.02, "decode_s_per_token_alone": 0.005}
    # One more in a step takes 0.1 ms.
    grown = steps_of(warm | {"decode_s_per_token_burst": 0.005 + 1e-4 * (BURST - 1)}, READ)
    assert (grown.prefill_s, grown.decode_s, grown.read_bytes_per_s) == (0.02, 0.005, READ)
    assert grown.decode_s_per_request == pytest.approx(1e-4)
    # What a clock says of a burst may be less; a step never shrinks with its requests.
    assert steps_of(warm | {"decode_s_per_token_burst": 0.004}, READ) == Steps(
        prefill_s=0.02, decode_s=0.005, decode_s_per_request=0.0, read_bytes_per_s=READ
    )


def test_nothing_to_check(tmp_path: Path) -> None:
    Results(tmp_path).write(*canned("stock:2", 1.0))
    with pytest.raises(ValueError, match="--check"):
        list(check(tmp_path, 1e9, READ))
