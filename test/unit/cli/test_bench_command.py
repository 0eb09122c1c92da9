"""`graft bench`: options reach the plan, and wrong ones are said."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_graft.bench import run
from sglang_graft.bench.units import Unit
from sglang_graft.cli.app import app

RUN = CliRunner()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny random model."""
    result = RUN.invoke(app, ["bench", "model", "tiny", "--out", str(tmp_path / "model")])
    assert result.exit_code == 0, result.output
    return tmp_path / "model"


def test_options_reach_the_plan(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[run.Bench] = []

    def measure(self: run.Bench) -> int:
        seen.append(self)
        return sum(len(list(plan.units())) for plan in self.plans)

    monkeypatch.setattr(run.Bench, "run", measure)
    args = ["bench", "run", "chat", "--model", str(model), "--out", str(tmp_path / "out")]
    args += ["--peer", "stock:8,16", "--peer", "graft:cost", "--budget-gb", "6,12"]
    args += ["--rates", "2,4", "--repeats", "3", "--seed", "5", "--device", "cpu"]
    args += ["--adapters", "7", "--seconds", "9", "--server-args", "--a 1", "--graft-args", "--b"]
    args += ["--distinct-weights", "2", "--stop-after-s", "500", "--commit", "abc"]
    args += ["--start-together", "3"]
    result = RUN.invoke(app, args)
    assert result.exit_code == 0, result.output
    assert f"{3 * 2 * 2 * 3} units are left" in result.output
    (bench,) = seen
    (plan,) = bench.plans
    units: list[Unit] = list(plan.units())
    assert {unit.peer.label for unit in units} == {"stock:8", "stock:16", "graft:cost"}
    assert {unit.budget_gb for unit in units} == {6.0, 12.0}
    assert {(u.load.rate, u.load.seed) for u in units} == {
        (r, s) for r in (2, 4) for s in (5, 6, 7)
    }
    assert {(u.load.adapters, u.load.seconds) for u in units} == {(7, 9.0)}
    assert (plan.distinct, bench.stop_after_s) == (2, 500.0)
    assert bench.start_together == 3
    assert bench.settings.more["all"] == ["--a", "1"]
    assert bench.settings.more["graft"] == ["--b"]
    assert bench.about["machine"].startswith("CPU, ")
    assert bench.about["versions"]["commit"] == "abc"
    assert str(tmp_path) not in json.dumps(bench.about)


def test_rates_of_the_protocol(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[run.Bench] = []
    monkeypatch.setattr(run.Bench, "run", lambda self: seen.append(self) or 0)
    args = ["--model", str(model), "--out", str(tmp_path), "--peer", "base", "--device", "cpu"]
    assert RUN.invoke(app, ["bench", "run", "all", *args]).exit_code == 0
    plans = [plan for bench in seen for plan in bench.plans]
    rates = {plan.loads[0].name: [load.rate for load in plan.loads] for plan in plans}
    assert rates["uniform-cold"] == [4.0, 8.0, 16.0]
    assert rates["chat"] == [None]
    assert len(rates) == 6


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "nothing", "--peer", "base"], "nothing"),
        (["run", "chat", "--peer", "vllm"], "--peer"),
        (["run", "chat", "--peer", "base", "--budget-gb", "0"], "--budget-gb"),
        (["run", "chat", "--peer", "base", "--rates", "two"], "--rates"),
        (["run", "chat", "--peer", "base", "--device", "tpu"], "--device"),
    ],
)
def test_wrong_use(args: list[str], message: str, model: Path, tmp_path: Path) -> None:
    more = ["--model", str(model), "--out", str(tmp_path / "out")]
    more += [] if "--device" in args else ["--device", "cpu"]
    result = RUN.invoke(app, ["bench", *args, *more])
    assert result.exit_code == 2
    assert message in result.output


CAMPAIGN = """
distinct_weights = 2
server_args = "--a 1"
graft_args = "--b"

[[lots]]
[[lots.runs]]
workload = "chat"
budget_gb = [6, 24]
rates = [4]
seconds = 9
peers = ["graft:cost"]
[[lots.runs]]
workload = "agents"
budget_gb = [24]
rates = [2, 4]
seconds = 9
peers = ["stock:8,16"]
seeds = [1, 2]
[[lots]]
[[lots.runs]]
workload = "many"
adapters = 7
budget_gb = [6]
rates = [4]
seconds = 9
drain_s = 3
peers = ["base"]
"""


def test_a_campaign_is_every_run_of_its_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[run.Bench] = []
    monkeypatch.setattr(run.Bench, "run", lambda self: seen.append(self) or 3)
    file = tmp_path / "campaign.toml"
    file.write_text(CAMPAIGN)
    args = ["--model", str(model), "--out", str(tmp_path / "out"), "--device", "cpu"]
    result = RUN.invoke(app, ["bench", "campaign", str(file), *args, "--stop-after-s", "77"])
    assert result.exit_code == 0, result.output
    assert "6 units are left" in result.output
    first, second = seen
    assert {bench.start_together for bench in seen} == {None}
    assert {bench.stop_after_s for bench in seen} == {77.0}
    assert first.started == second.started  # one end for all lots
    assert first.settings.more["all"] == ["--a", "1"]
    assert first.settings.more["graft"] == ["--b"]
    units = [unit for plan in first.plans for unit in plan.units()]
    assert [unit.key for unit in units][:3] == [
        "chat-6gb-graft-cost-rate4-9s-seed0",
        "chat-24gb-graft-cost-rate4-9s-seed0",
        "agents-24gb-stock-8-rate2-9s-seed1",
    ]
    assert len(units) == 2 + 2 * 2 * 2
    (plan,) = second.plans
    assert (plan.drain_s, plan.distinct) == (3.0, 2)
    assert [unit.load.adapters for unit in plan.units()] == [7]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lots = []", "lots: "),
        ("lots = [", "campaign.toml: "),
        (CAMPAIGN.replace('"chat"', '"chatter"'), "lots.0.runs.0: workload: wanted one of"),
        (CAMPAIGN.replace('"base"', '"vllm"'), "lots.1.runs.0: --peer: wanted"),
        (CAMPAIGN.replace("rates = [2, 4]", "rates = [2, -4]"), "lots.0.runs.1: rates"),
        (CAMPAIGN.replace("drain_s", "drains"), "lots.1.runs.0.drains: "),
        (CAMPAIGN.replace("seeds = [1, 2]", "seeds = []"), "lots.0.runs.1.seeds: "),
    ],
)
def test_a_wrong_campaign(text: str, message: str, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "campaign.toml"
    file.write_text(text)
    more = ["--model", str(model), "--out", str(tmp_path / "out"), "--device", "cpu"]
    result = RUN.invoke(app, ["bench", "campaign", str(file), *more])
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " "), result.output


def test_nothing_to_report(tmp_path: Path) -> None:
    result = RUN.invoke(app, ["bench", "report", str(tmp_path)])
    assert result.exit_code == 2
    assert "found none" in result.output


def test_export(model: Path, tmp_path: Path) -> None:
    args = ["bench", "export", "all", "--model", str(model), "--out", str(tmp_path / "files")]
    result = RUN.invoke(app, [*args, "--seconds", "20"])
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "files").glob("*.jsonl"))) == 6
    assert result.output.count("sglang.bench_serving") == 6
