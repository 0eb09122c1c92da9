"""The committed results: the page shows them, and they hold what the page says of them."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
Row = dict[str, Any]


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    path = ROOT / "benchmark/cache/replay_policies.py"
    spec = importlib.util.spec_from_file_location("replay_policies", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


@pytest.fixture(scope="module")
def rows(study: ModuleType) -> list[Row]:
    found: list[Row] = study.load()
    return found


def pairs(rows: list[Row], study: str, one: str, other: str) -> list[float]:
    """Seconds of policy `one` over those of `other`, case by case."""
    seconds = {
        (row["workload"], row["budget_gb"], row["seed"], row["policy"]): row["cost_seconds"]
        for row in rows
        if row["study"] == study
    }
    return [
        cost / seconds[(*key, other)] for (*key, policy), cost in seconds.items() if policy == one
    ]


def test_every_case_is_there(study: ModuleType, rows: list[Row]) -> None:
    wanted = [
        (case.name, workload, seed, budget, policy)
        for case in study.STUDIES
        for workload in case.workloads
        for seed in case.seeds
        for budget in case.budgets
        for policy in case.policies
    ]
    found = [
        (row["study"], row["workload"], row["seed"], row["budget_gb"], row["policy"])
        for row in rows
    ]
    assert found == wanted
    assert {row["requests"] for row in rows} == {study.REQUESTS}


def test_the_page_shows_the_results(study: ModuleType, rows: list[Row]) -> None:
    text = study.PAGE.read_text(encoding="utf-8")
    assert study.page(text, rows) == text


@pytest.mark.parametrize("workload", ["chat", "agents", "swing"])
def test_cost_is_near_the_bound(rows: list[Row], workload: str) -> None:
    own = [row for row in rows if row["study"] == "main" and row["policy"] == "cost"]
    ratios = [row["ratio"] for row in own if row["workload"] == workload]
    assert len(ratios) == 9
    assert max(ratios) <= 1.15


def test_cost_is_never_much_worse_than_lru(rows: list[Row]) -> None:
    found = pairs(rows, "main", "cost", "lru")
    assert len(found) == 6 * 3 * 3
    assert max(found) <= 1.02


def test_no_row_is_below_its_bound(rows: list[Row]) -> None:
    assert min(row["ratio"] for row in rows) >= 1 - 1e-9


def test_with_the_dependency_rule_no_kv_is_invalid(rows: list[Row]) -> None:
    kept = {row["study"]: 0 for row in rows}
    for row in rows:
        kept[row["study"]] += row["invalid_kv_pages"]
    assert kept.pop("no dependency rule") > 0
    assert set(kept.values()) == {0}
