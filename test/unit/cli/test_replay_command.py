"""`graft replay`: rows, plot, and clear errors."""

import gc
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_graft.cli.app import app
from sglang_graft.cli.replay import rare_collections

RUN = CliRunner()
SMALL = ["--requests", "40", "--budget-gb", "6,12"]


def replay(*args: str) -> list[dict[str, object]]:
    result = RUN.invoke(app, ["replay", *args, "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


def test_one_line_of_json_for_each_budget_and_policy() -> None:
    rows = replay("chat", *SMALL)
    assert [(row["budget_gb"], row["policy"]) for row in rows] == [
        (budget, policy) for budget in (6, 12) for policy in ("cost", "elora", "lru")
    ]
    promised = {"workload", "policy", "budget_gb", "cost_seconds", "optimum_seconds", "ratio"}
    assert promised <= set(rows[-1])


def test_the_same_seed_gives_the_same_rows() -> None:
    args = ("agents", *SMALL, "--policy", "cost", "--seed", "3")
    assert replay(*args) == replay(*args)


def test_switches_reach_the_replay() -> None:
    on = replay("swing", *SMALL, "--policy", "cost")[0]
    off = replay("swing", *SMALL, "--policy", "cost", "--no-host-tier", "--no-prefetch")[0]
    assert (on["host_gb"], off["host_gb"]) == (64, 0)
    assert (on["prefetch"], off["prefetch"]) == (True, False)
    free = replay("many", *SMALL, "--policy", "lru", "--no-dependency-rule", "--no-optimum")[0]
    assert (free["dependency_rule"], free["optimum_seconds"], free["ratio"]) == (False, None, None)
    assert replay("chat", *SMALL, "--adapters", "7", "--rate", "9")[0]["adapters"] == 7


def test_a_table_names_every_policy() -> None:
    result = RUN.invoke(app, ["replay", "chat", "--requests", "20"])
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("cost", "elora", "lru", " 6 ", " 24 "))


def test_plot_is_written(tmp_path: Path) -> None:
    path = tmp_path / "cost.png"
    replay("many", *SMALL, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    args = ["replay", "many", *SMALL, "--json", "--plot", str(tmp_path / "cost.png")]
    result = RUN.invoke(app, args)
    assert result.exit_code == 2
    assert "sglang-graft[plot]" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["chats"], "WORKLOAD: wanted one of"),
        (["chat", "--policy", "mru"], "wanted one of cost, elora, lru; got 'mru'"),
        (["chat", "--budget-gb", "6,x"], "--budget-gb: wanted numbers above 0"),
        (["chat", "--budget-gb", "0"], "--budget-gb: wanted numbers above 0"),
        (["chat", "--budget-gb", "0.01"], "raise --budget-gb"),
        (["chat", "--requests", "1"], "--requests: wanted 2 or more"),
        (["many", "--host-gb", "0.1", *SMALL], "--host-gb: wanted room for"),
    ],
)
def test_wrong_use_is_told_with_the_option(args: list[str], message: str) -> None:
    result = RUN.invoke(app, ["replay", *args])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_the_collector_is_as_before_afterwards() -> None:
    before = gc.get_threshold()
    with rare_collections():
        meanwhile = gc.get_threshold()
    assert meanwhile[0] > before[0]
    assert gc.get_threshold() == before
