"""Figures of two sides are compared for the same requests."""

from typing import Any

from sglang_graft.bench.pairs import TTFT, Pair, over_default_peak, pairs, told
from sglang_graft.bench.table import Place, Row

PLACE = Place("chat", None, 25.0, None, 12.0)


def row(label: str, rate: float, means: dict[int, float]) -> Row:
    """One peer at one rate, with a mean TTFT in ms for each seed."""
    engine, _, slots = label.partition(":")
    peer = {"label": label, "engine": engine, "base_traffic": False}
    peer["slots"] = int(slots) if engine == "stock" else 0
    results: list[dict[str, Any]] = [
        {
            "unit": {"load": {"seed": seed}},
            "figures": {"ttft_ms": {"mean": mean}, "errors": 0, "ttft_cut": 0, "sent": 10},
        }
        for seed, mean in means.items()
    ]
    return Row(PLACE, peer, rate, asked=len(results), results=results)


def test_each_seed_is_beside_the_best_that_had_it() -> None:
    own = row("graft:cost", 4.0, {0: 100.0, 1: 300.0, 2: 50.0})
    others = [row("stock:8", 4.0, {0: 400.0, 1: 500.0}), row("stock:16", 4.0, {0: 200.0})]
    found = pairs(own, others, *TTFT)
    assert found == [Pair(0, 100.0, 200.0, "stock:16", 2), Pair(1, 300.0, 500.0, "stock:8", 1)]
    assert told(found, own) == "0.55x (0.50-0.60, 2 of 3 seeds)"
    assert told(found[:1], row("graft:cost", 4.0, {0: 100.0})) == "0.50x"
    assert told([], own) == "-"


def test_a_peak_lies_above_the_lowest_rate_that_the_default_does_not_serve() -> None:
    rows = [row("graft:cost", rate, {0: 100.0}) for rate in (4.0, 8.0)]
    rows += [row("stock:8", 2.0, {0: 100.0}), row("stock:8", 4.0, {0: 900.0})]
    assert over_default_peak(rows, PLACE, "graft:cost") == 2.0
    assert over_default_peak(rows, PLACE, "stock:8") == 0.5
    assert over_default_peak(rows[:3], PLACE, "graft:cost") is None, "no rate was too high for it"


def test_a_peak_holds_for_each_seed() -> None:
    rows = [row("graft:cost", 8.0, {0: 100.0, 1: 100.0}), row("stock:8", 4.0, {0: 900.0, 1: 900.0})]
    assert over_default_peak(rows, PLACE, "graft:cost") == 2.0
    rows.append(row("graft:cost", 4.0, {1: 100.0}))
    rows[0] = row("graft:cost", 8.0, {0: 100.0, 1: 900.0})
    assert over_default_peak(rows, PLACE, "graft:cost") == 1.0
