"""The committed results: the page shows them, and they hold what the project promises."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def study() -> ModuleType:
    path = ROOT / "benchmark/cache/replay_policies.py"
    spec = importlib.util.spec_from_file_location("replay_policies", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(study: ModuleType) -> list[dict[str, Any]]:
    return json.loads(study.RESULTS.read_text(encoding="utf-8"))


def test_the_page_shows_the_results(study: ModuleType, rows: list[dict[str, Any]]) -> None:
    text = study.PAGE.read_text(encoding="utf-8")
    assert study.page(text, rows) == text


@pytest.mark.parametrize("workload", ["chat", "agents", "swing"])
def test_cost_is_near_the_bound(rows: list[dict[str, Any]], workload: str) -> None:
    own = [r for r in rows if r["study"] == "main" and r["policy"] == "cost"]
    ratios = [r["ratio"] for r in own if r["workload"] == workload]
    assert len(ratios) == 9
    assert max(ratios) <= 1.15


def test_cost_is_never_much_worse_than_lru(rows: list[dict[str, Any]]) -> None:
    main = [r for r in rows if r["study"] == "main"]
    seconds = {
        (r["workload"], r["budget_gb"], r["seed"], r["policy"]): r["cost_seconds"] for r in main
    }
    pairs = [(cost, seconds[(*key, "lru")]) for (*key, p), cost in seconds.items() if p == "cost"]
    assert len(pairs) == 6 * 3 * 3
    assert max(cost / lru for cost, lru in pairs) <= 1.02


def test_no_row_is_below_its_bound(rows: list[dict[str, Any]]) -> None:
    assert min(r["ratio"] for r in rows) >= 1 - 1e-9
