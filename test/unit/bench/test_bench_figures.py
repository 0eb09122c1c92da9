"""Figures by hand, and nothing left out."""

import pytest
from helpers_bench import FakeServer, graft_report

from sglang_graft.bench.figures import columns, figures, moved, spread
from sglang_graft.bench.play import UNFINISHED, Record
from sglang_graft.bench.samples import Sample, StockSizes, graft_sample, stock_report, stock_sample


def record(index: int, ttft_s: float | None, error: str = "", waited_s: float = 0.0) -> Record:
    return Record(
        index,
        0,
        prompt=100,
        output=3,
        due_s=float(index),
        sent_s=index + 0.001,
        end_s=index + 2.0,
        ttft_s=ttft_s,
        waited_s=waited_s,
        cached=25,
        tokens=0 if error else 3,
        gaps_s=[] if error else [0.01, 0.03],
        error=error,
    )


def test_figures_by_hand() -> None:
    found = figures([record(0, 0.1), record(1, 0.3)], planned=2)
    assert found["ttft_ms"]["mean"] == pytest.approx(200)
    assert found["ttft_ms"]["p50"] == pytest.approx(200)
    assert found["tpot_ms"]["mean"] == pytest.approx(20)
    assert found["itl_ms"]["max"] == pytest.approx(30)
    assert found["e2e_ms"]["mean"] == pytest.approx(2000)
    assert found["wall_s"] == pytest.approx(3)
    assert found["requests_per_s"] == pytest.approx(2 / 3)
    assert found["output_tokens_per_s"] == pytest.approx(2)
    assert found["prefix_hit_rate"] == pytest.approx(0.25)
    assert found["client_delay_ms"]["mean"] == pytest.approx(1)
    assert (found["completed"], found["errors"], found["unfinished"], found["not_sent"]) == (
        *(2, 0, 0, 0),
    )


def test_requests_without_a_token_count_with_what_they_waited() -> None:
    rows = [record(0, 0.1), record(1, None, UNFINISHED, 40.0), record(2, None, "broken", 0.2)]
    found = figures(rows, planned=6)
    assert found["ttft_ms"]["mean"] == pytest.approx((100 + 40_000 + 200) / 3)
    assert found["ttft_cut"] == 2
    assert (found["completed"], found["errors"], found["unfinished"], found["not_sent"]) == (
        *(1, 1, 1, 3),
    )
    assert found["e2e_ms"]["mean"] == pytest.approx(2000)


def test_nothing_at_all() -> None:
    found = figures([], planned=0)
    assert found["ttft_ms"] is None
    assert found["requests_per_s"] is None
    assert spread([]) is None
    assert moved([]) == {}


def test_columns_hold_every_record() -> None:
    found = columns([record(0, 0.12345), record(1, None, UNFINISHED, 40.0)])
    assert {len(values) for values in found.values()} == {2}
    assert found["ttft_s"] == [0.1235, None]
    assert found["longest_gap_s"] == [0.03, 0.0]
    assert found["tpot_s"] == [0.02, None]


def sample(at_s: float, loads: int, invalid: int) -> Sample:
    return Sample(
        at_s=at_s,
        budget=100,
        adapter=10,
        kv_cached=40,
        kv_running=10,
        kv_invalid=invalid,
        free=40,
        loads=loads,
        evictions=loads,
        bytes_to_device=7 * loads,
    )


def test_what_moved_is_counted_from_the_first_sample() -> None:
    found = moved([sample(0, 5, 0), sample(1, 7, 20), sample(2, 8, 10)])
    assert (found["loads"], found["evictions"], found["bytes_to_device"]) == (3, 3, 21)
    assert "bytes_to_host" not in found
    assert found["invalid_kv_share"]["mean"] == pytest.approx((0 + 0.5 + 0.25) / 3)
    assert found["used_share"]["mean"] == pytest.approx((0.6 + 0.4 + 0.5) / 3)


def test_a_sample_of_graft() -> None:
    found = graft_sample(graft_report(100, loads=2), 1.5)
    assert found.budget == 100 * 1024
    assert found.adapter + found.kv_cached + found.kv_running + found.free == found.budget
    assert (found.kv_invalid, found.loads, found.bytes_to_device) == (0, 2, 10 * 1024)


def test_a_sample_of_stock() -> None:
    server = FakeServer(kv_tokens=1000)
    server.bodies += [{}] * 4
    info = {"internal_states": [{"graft_stock_probe": server.stock_report()}]}
    sizes = StockSizes(10, 500, {"adapter-0": 300})
    found = stock_sample(stock_report(info), 1.5, sizes)
    assert found.budget == 1000 * 10 + 2 * 500
    assert found.adapter + found.kv_cached + found.kv_running + found.free == found.budget
    assert (found.kv_cached, found.kv_invalid, found.kv_running) == (1000, 250, 1000)
    assert (found.loads, found.bytes_to_device) == (4, 1200)
    with pytest.raises(RuntimeError, match="GRAFT_STOCK_PROBE"):
        stock_report({"internal_states": [{}]})
