"""benchmark/serving/bench_gap.py, short, on the CPU: adapters stream in beside running requests."""

import json
import sys
from pathlib import Path

import pytest

from sglang_graft.bench.make_model import make_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "serving"))

import bench_gap

pytestmark = pytest.mark.server


def test_cold_adapters_stream_in_beside_running_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "out.json"
    line = ["--model", str(make_model("tiny", tmp_path / "model")), "--json", str(out)]
    line += ["--device", "cpu", "--work", str(tmp_path / "work"), "--seconds", "1.5"]
    line += ["--running", "3", "--warm", "2", "--rounds", "2", "--tokens", "2000"]
    monkeypatch.setattr(sys, "argv", ["bench_gap.py", *line, "--prompt", "32"])
    bench_gap.main()
    found = json.loads(out.read_text())
    for kind in ("quiet", "cold", "warm"):
        assert found[kind]["gaps"] > 0, kind
        assert found[kind]["gap_ms"]["mean"] > 0
    cold, warm = found["cold"], found["warm"]
    assert cold["requests"] == warm["requests"] > 10  # the same requests
    assert cold["loads"] >= 0.9 * cold["requests"]
    assert cold["bytes_to_device"] >= cold["loads"] * found["adapter_bytes"]
    assert cold["disk_reads"] == 0
    assert warm["loads"] <= 2
    assert found["quiet"]["requests"] == found["quiet"]["loads"] == 0
    assert set(found["cold_over_warm"]) == {"mean", "p50", "p99"}
    assert len(found["cold_over_warm_mean_by_round"]) == 2
