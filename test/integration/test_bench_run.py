"""`graft bench run` as a user runs it, small: Graft and stock SGLang start together on the CPU."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_graft.bench.units import Results
from sglang_graft.cli.app import app

pytestmark = pytest.mark.server

PEERS = ("stock:2", "graft:cost")
# Twenty requests to four adapters, which do not fit into two slots while their KV fits beside them.
LOAD = ("--rates", "2", "--seconds", "3", "--adapters", "6", "--seed", "1", "--budget-gb", "0.008")


def invoke(*args: str) -> str:
    result = CliRunner().invoke(app, ["bench", *args])
    assert result.exit_code == 0, result.output
    return result.output


def test_both_sides_are_measured_once_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model, out, page = tmp_path / "model", tmp_path / "out", tmp_path / "page.md"
    invoke("model", "tiny", "--out", str(model))
    run = ["run", "chat", "--model", str(model), "--out", str(out), "--device", "cpu", *LOAD]
    run += ["--work-dir", str(tmp_path / "work"), *(f"--peer={peer}" for peer in PEERS)]
    run += ["--start-together", "2", "--graft-args", "--graft-host-memory-gb 1"]
    assert "all units are there" in invoke(*run)
    found = {r["unit"]["peer"]["label"]: r for r in Results(out).read_some()}
    assert set(found) == set(PEERS)
    for label, result in found.items():
        assert result["status"] == "measured", (label, result.get("why"))
        assert (result["started_together"], result["beside"]) == (2, PEERS[-1] != label), label
        figures = result["figures"]
        assert figures["completed"] == figures["planned"], (label, figures)
        assert figures["ttft_ms"]["mean"] > 0
        assert figures["prefix_hit_rate"] > 0.3, label  # turns find what those before them left
        split = result["split"]
        assert max(result["samples"]["budget"]) <= split["budget_bytes"]
        assert result["moved"]["loads"] > 0
    ours, stock = found["graft:cost"], found["stock:2"]
    assert ours["moved"]["invalid_kv_share"]["max"] == 0
    assert stock["moved"]["evictions"] > 0
    assert stock["moved"]["invalid_kv_share"]["max"] > 0
    gates = [json.loads(path.read_text()) for path in (out / "gates").glob("*.json")]
    answers = {gate["peer"]["label"]: [row["ids"] for row in gate["alone"]] for gate in gates}
    assert answers["graft:cost"] == answers["stock:2"]
    # Nothing is left: no server starts, and no file changes.
    before = {path: path.read_bytes() for path in out.rglob("*.json")}
    assert "2 of 2 units are there" in invoke(*run)
    assert {path: path.read_bytes() for path in out.rglob("*.json")} == before
    invoke("report", str(out), "--markdown", str(page), "--plots", str(tmp_path / "plots"))
    text = page.read_text()
    assert "| graft:cost | 2 |" in text
    assert "**missing**" not in text
    assert "stock:2, 1 paused; graft:cost, 0 paused" in text
