"""Predictions beside measurements: canned results of a server that behaves as the model says."""

from pathlib import Path
from typing import Any

import pytest

from sglang_graft.bench.check import check, decode_seconds, model_of, summary
from sglang_graft.bench.peers import parse_peers
from sglang_graft.bench.units import Load, Results, Unit
from sglang_graft.bench.warm import BURST
from sglang_graft.sim.capacity import predict
from sglang_graft.sim.workloads import AdapterSpec, Request, Segment, Workload

LOAD = Load(name="chat", rate=4.0, seconds=5.0, adapters=4)
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
    model = model_of(result | {"unit": unit.describe()}, workload, 50.7e9)
    guess = predict(workload, 0.02, model)
    spread = {key: 1e3 * factor * value for key, value in guess["ttft_s"].items()}
    result["figures"] = {"ttft_ms": spread, "prefix_hit_rate": guess["prefix_hit_rate"]}
    return unit, result


def test_errors_are_relative_to_what_was_measured(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for label, factor in (("graft:cost", 2.0), ("graft:lru+no-prefetch", 1.0), ("stock:2", 9.0)):
        results.write(*canned(label, factor))
    results.write(*canned("graft:cost+no-host-kv", 5.0))  # not modelled
    found = {row["unit"]: row for row in check(tmp_path, 50.7e9)}
    assert len(found) == 2
    cost = next(row for key, row in found.items() if "graft-cost" in key)
    assert cost["error"]["mean"] == pytest.approx(-0.5)
    assert cost["predicted_hit_rate"] == pytest.approx(cost["measured_hit_rate"])
    assert cost["measured_loads"] == cost["predicted_loads"] == 4
    errors = summary(list(found.values()))
    assert errors["mean_largest"] == pytest.approx(0.5)
    assert errors["mean_median"] == pytest.approx(0.25)


def test_the_model_is_that_of_the_units_server() -> None:
    unit, result = canned("graft:elora+no-prefetch", 1.0)
    workload = LOAD.workload()
    result["unit"] = unit.describe()
    model = model_of(result, workload, 1e9)
    assert (model.policy, model.options.prefetch) == ("elora", False)
    assert model.options.rates.h2d_bytes_per_s == 1e9
    # Every adapter fits into host memory, where it was put when it was registered.
    assert model.options.rates.read_seconds(1e9) < 1e-3
    small = model_of(result | {"host_bytes": 1000}, workload, 1e9)
    assert small.options.rates.disk_bytes_per_s == 2e9


def test_decode_slows_with_the_requests_that_decode_at_once() -> None:
    def asked(count: int, every_s: float) -> Workload:
        requests = tuple(
            Request(0, (Segment(i, 4),), Segment(900 + i, 10, generated=True), i * every_s)
            for i in range(count)
        )
        return Workload("tiny", 0, (AdapterSpec("a", 8),), requests)

    # One more beside takes 0.1 s of a step; 11 requests of 10 tokens in 100 s.
    burst = 1.0 + 0.1 * (BURST - 1)
    assert decode_seconds(1.0, burst, asked(11, 10.0)) == pytest.approx(1 / (1 - 0.1 * 1.1))
    assert decode_seconds(1.0, burst, asked(11, 0.1)) == burst
    assert decode_seconds(1.0, burst, asked(3, 0.0)) == burst
    assert decode_seconds(1.0, 0.9, asked(11, 10.0)) == pytest.approx(0.9)


def test_nothing_to_check(tmp_path: Path) -> None:
    Results(tmp_path).write(*canned("stock:2", 1.0))
    with pytest.raises(ValueError, match="--check"):
        list(check(tmp_path, 1e9))
