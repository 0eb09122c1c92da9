"""`graft plan`: sources, a choice, and clear errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_graft.bench.peers import parse_peers
from sglang_graft.bench.units import Load, Results, Unit
from sglang_graft.cli.app import app

RUN = CliRunner()
SMALL = ["--requests", "40", "--budget-gb", "6,12", "--host-gb", "16", "--replicas", "1,2"]


def planned(*args: str) -> dict[str, Any]:
    result = RUN.invoke(app, ["plan", *args, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_a_workload_by_name_and_a_choice() -> None:
    found = planned("chat", *SMALL, "--goal-ms", "10000")
    assert [(r["replicas"], r["budget_gb"]) for r in found["rows"]] == [(1, 6), (1, 12)]
    assert found["chosen"] == found["rows"][0]
    hard = planned("chat", *SMALL, "--goal-ms", "0.001")
    assert [r["replicas"] for r in hard["rows"]] == [1, 1, 2, 2]
    assert hard["chosen"] is None


def test_what_a_table_says() -> None:
    result = RUN.invoke(app, ["plan", "chat", *SMALL, "--goal-ms", "10000"])
    assert "Cheapest that meets the goal: 1 replicas with 6.0 GB" in result.output
    assert "docs/plan.md" in result.output


def test_budgets_are_quarters_of_what_the_base_leaves() -> None:
    found = planned("chat", "--requests", "40", "--gpu-gb", "64", "--base-gb", "24")
    assert sorted({r["budget_gb"] for r in found["rows"]}) == [10, 20, 30, 40]


def test_a_history_and_a_measured_unit_are_sources(tmp_path: Path) -> None:
    row = {"start_s": 0, "seconds": 10, "adapter": "a", "rank": 16, "requests": 20}
    row |= {"prompt_tokens": 600, "output_tokens": 20, "shared_tokens": 400}
    (tmp_path / "traffic.jsonl").write_text(json.dumps(row))
    found = planned(str(tmp_path / "traffic.jsonl"), *SMALL)
    assert found["rows"][0]["prompt_tokens"] == 20 * 600
    assert found["rows"][0]["adapter_loads"] == 1
    assert found["rows"][0]["prefix_hit_rate"] > 0.5
    load = Load(name="chat", rate=2.0, seconds=5.0)
    unit = Unit(peer=parse_peers(["base"])[0], load=load, budget_gb=6.0)
    results = Results(tmp_path)
    results.write(unit, {"status": "measured"})
    found = planned(str(results.path(unit)), *SMALL)
    wanted = sum(r.prompt_tokens for r in load.workload().requests)
    assert found["rows"][0]["prompt_tokens"] == wanted


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing"], "SOURCE"),
        (["chat", "--policy", "fifo"], "fifo"),
        (["chat", "--routing", "nearest"], "--routing"),
        (["chat", "--goal-figure", "p12"], "--goal-figure"),
        (["chat", "--goal-ms", "0"], "--goal-ms"),
        (["chat", "--budget-gb", "no"], "--budget-gb"),
        (["chat", "--host-gb", "-1"], "--host-gb"),
        (["chat", "--gpu-gb", "10"], "--gpu-gb"),
        (["chat", "--requests", "40", "--replicas", "0"], "--replicas"),
        (["--check", "nowhere"], "found none"),
    ],
)
def test_wrong_use(args: list[str], message: str) -> None:
    result = RUN.invoke(app, ["plan", *args])
    assert result.exit_code == 2
    assert message in result.output
