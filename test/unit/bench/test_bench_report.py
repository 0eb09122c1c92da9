"""The report of canned results: ratios, peaks, and nothing left out."""

from pathlib import Path
from typing import Any

import pytest

from sglang_graft.bench.peers import parse_peers
from sglang_graft.bench.plots import draw
from sglang_graft.bench.report import REMARKS, report
from sglang_graft.bench.table import peak, rows
from sglang_graft.bench.units import Load, Results, Unit, write_json

ABOUT = {
    "machine": "GPU X",
    "model": "8 layers",
    "dtype": "bfloat16",
    "versions": {"torch": "2.0", "commit": "abc", "driver": None},
}
# Mean TTFT in ms by peer and rate.
TTFT = {
    "stock:8": {2.0: 400.0, 4.0: 900.0},
    "stock:16": {2.0: 300.0, 4.0: 700.0},
    "graft:cost": {2.0: 120.0, 4.0: 350.0},
    "graft:lru": {2.0: 310.0, 4.0: 350.0},
    "base": {2.0: 90.0, 4.0: 95.0},
}


def unit(label: str, rate: float, seed: int = 0) -> Unit:
    load = Load(name="chat", rate=rate, seconds=60.0, seed=seed)
    return Unit(peer=parse_peers([label])[0], load=load, budget_gb=12.0)


def result(ttft_ms: float, **wrong: int) -> dict[str, Any]:
    spread = {"mean": ttft_ms, "p50": ttft_ms, "p99": 2 * ttft_ms}
    counts = {"planned": 10, "sent": 10, "completed": 10, "errors": 0, "unfinished": 0}
    return {
        "status": "measured",
        "about": ABOUT,
        "split": {"adapter_bytes": 5, "kv_tokens": 7, "arithmetic": "12 = 5 + 7"},
        "figures": {
            **counts | {"not_sent": 0, "ttft_cut": 0} | wrong,
            "ttft_ms": spread,
            "tpot_ms": spread,
            "requests_per_s": 2.0,
            "output_tokens_per_s": 128.0,
            "prefix_hit_rate": 0.5,
        },
        "moved": {"loads": 3, "evictions": 2, "bytes_to_device": 2_000_000_000},
        "samples": {
            "at_s": [0.0, 1.0],
            **{f"kv_{kind}": [1e9, 2e9] for kind in ("running", "cached", "invalid")},
            "adapter": [1e9, 2e9],
            "budget": [12e9, 12e9],
        },
        "records": {"ttft_s": [ttft_ms / 1e3, None], "waited_s": [1.0, 9.0]},
    }


@pytest.fixture
def results(tmp_path: Path) -> Results:
    found = Results(tmp_path)
    units = [unit(label, rate) for label in TTFT for rate in TTFT[label]]
    found.ask([*units, unit("graft:elora", 2.0)])
    for one in units:
        assert one.load.rate is not None
        found.write(one, result(TTFT[one.peer.label][one.load.rate]))
    found.write(
        unit("stock:64", 2.0),
        {
            "status": "infeasible",
            "why": "too small",
            "about": ABOUT,
            "split": {"adapter_bytes": 50, "kv_tokens": 0, "arithmetic": "12 < 50"},
        },
    )
    return found


def line(text: str, label: str, rate: str) -> list[str]:
    """The cells of one row of the first table of figures."""
    found = [row for row in text.splitlines() if row.startswith(f"| {label} | {rate} |")]
    return [cell.strip() for cell in found[0].split("|")[1:-1]]


def losses(text: str) -> str:
    """What the report says of rows where Graft does not win."""
    return text[text.index("does not win here") : text.index("## Not measured")]


def test_ratios_are_to_the_best_and_to_the_default_split(results: Results) -> None:
    text = report(results.folder)
    assert line(text, "graft:cost", "2")[-2:] == ["0.40x", "0.30x"]
    assert line(text, "graft:lru", "4")[-2:] == ["0.50x", "0.39x"]
    assert line(text, "stock:8", "2")[-2:] == ["1.33x", "1.00x"]
    assert line(text, "base", "2")[-2:] == ["1.00x of base", "-"]  # other traffic
    results.write(unit("graft:base-traffic", 2.0), result(99.0))
    assert line(report(results.folder), "graft:base-traffic", "2")[-2:] == ["1.10x of base", "-"]


def test_peak_rates(results: Results) -> None:
    found = rows(results)
    place = found[0].place
    ours, stock = (peak(found, place, label) for label in ("graft:cost", "stock:8"))
    assert (ours.rate, ours.fails) == (4.0, None)
    assert (stock.rate, stock.fails) == (2.0, 4.0)
    text = report(results.folder)
    assert "| graft:cost | ≥ 4 | > 1.00x |" in text  # the split's peak lies between 2 and 4
    assert "| stock:8 | 2 to 4 | > 0.50x |" in text
    # The last turns may be under way when a unit ends, but few without a token.
    results.write(unit("graft:cost", 4.0), result(350.0, unfinished=9, ttft_cut=0))
    assert peak(rows(results), place, "graft:cost").rate == 4.0
    results.write(unit("graft:cost", 4.0), result(350.0, unfinished=1, ttft_cut=1))
    assert peak(rows(results), place, "graft:cost").rate == 2.0
    results.write(unit("stock:8", 2.0), result(600.0))
    text = report(results.folder)
    assert "| stock:8 | below 2 | - |" in text
    assert "| graft:cost | 2 to 4 | > 1.00x |" in text
    results.write(unit("stock:8", 2.0), result(100.0))
    results.write(unit("stock:8", 4.0), result(100.0))
    assert "| graft:cost | 2 to 4 | - |" in report(results.folder)  # the split failed nowhere
    results.write(unit("graft:cost", 2.0), result(350.0, errors=1))
    assert peak(rows(results), place, "graft:cost").rate is None


def test_peak_rates_are_for_the_same_requests(results: Results) -> None:
    # Seed 1 is so easy that the default split serves both rates; seed 2 only Graft was asked.
    for seed, label, rate, ttft in (
        (1, "stock:8", 2.0, 90.0),
        (1, "stock:8", 4.0, 95.0),
        (2, "graft:cost", 2.0, 120.0),
        (2, "graft:cost", 4.0, 600.0),
    ):
        results.write(unit(label, rate, seed), result(ttft))
    text = report(results.folder)
    # Not "≥ 4", which the median of 350 and 600 says, but seed 0 alone is compared.
    assert "| graft:cost | 2 to 4 | > 1.00x |" in text
    # With seed 1 the split failed nowhere, so nothing is sure of all that both have.
    results.write(unit("graft:cost", 4.0, seed=1), result(80.0))
    assert "| graft:cost | 2 to 4 | - |" in report(results.folder)


def test_remarks_of_the_folder_are_in_its_report(results: Results) -> None:
    assert "\n\n\n" not in report(results.folder)
    (results.folder / REMARKS).write_text("A person's words.\n")
    assert "\n\nA person's words.\n\n## Do the sides agree?" in report(results.folder)


def test_machines_that_differ_in_nothing_are_told_once(results: Results) -> None:
    for rate, driver in ((2.0, "580.1\n580.1"), (4.0, "580.1")):
        about = ABOUT | {"versions": {"torch": "2.0", "commit": f"c{rate:g}", "driver": driver}}
        results.write(unit("graft:cost", rate), result(100.0) | {"about": about})
    text = report(results.folder)
    assert text.count("driver 580.1") == 1
    assert "Commits: c2, c4." in text


def test_the_best_of_one_split_is_no_best(results: Results) -> None:
    (results.folder / "units" / f"{unit('stock:16', 2.0).key}.json").unlink()
    text = report(results.folder)
    assert line(text, "graft:cost", "2")[-2:] == ["0.30x of the only one", "0.30x"]
    assert line(text, "stock:8", "2")[-2:] == ["-", "1.00x"]


def test_ratios_compare_the_same_requests(results: Results) -> None:
    # Another seed, harder for all, that only some of them were asked.
    for label, ttft in (("graft:cost", 900.0), ("stock:8", 1000.0), ("base", 450.0)):
        results.write(unit(label, 2.0, seed=1), result(ttft))
    results.write(unit("graft:base-traffic", 2.0, seed=1), result(495.0))
    text = report(results.folder)
    ours = line(text, "graft:cost", "2")
    assert ours[2] == "510 (120-900)"
    # With seed 1 one split was tried, so none is the best: 120 over 300, not 510 over 300.
    assert ours[-2:] == ["0.40x (1 of 2 seeds)", "0.60x (0.30-0.90)"]
    assert line(text, "graft:lru", "2")[-2:] == ["1.03x", "0.78x"]  # not over the median of 8
    assert line(text, "graft:base-traffic", "2")[-2] == "1.10x of base"
    # Which split is the best is said by the seed.
    results.write(unit("stock:16", 2.0, seed=1), result(2000.0))
    ours = line(report(results.folder), "graft:cost", "2")
    assert ours[-2] == "0.65x (0.40-0.90)"


def test_a_loss_in_time_per_token_is_one(results: Results) -> None:
    assert "| graft:cost |" not in losses(report(results.folder))
    slow = result(120.0)
    slow["figures"]["tpot_ms"] = {"mean": 330.0, "p50": 1.0, "p99": 1.0}
    results.write(unit("graft:cost", 2.0), slow)
    text = losses(report(results.folder))
    assert "| graft:cost | 2 | 0 | mean TPOT | 330.0 | stock:16: 300.0 | 1.10x |" in text


def test_bad_rows_are_shown(results: Results) -> None:
    results.write(unit("graft:cost", 4.0), result(9000.0, completed=7, unfinished=3, ttft_cut=2))
    text = report(results.folder)
    cells = line(text, "graft:cost", "4")
    assert cells[2] == "≥9000"
    assert "7 of 10, 3 unfinished" in cells
    assert line(text, "stock:64", "2")[2] == "**infeasible: too small**"
    assert line(text, "graft:elora", "2")[2] == "**missing**"
    assert "graft:elora, rate 2: 1 of 1 units" in text
    lost = losses(text)
    assert "| graft:cost | 4 | 0 | mean TTFT | 9000 | stock:16: 700 | 12.86x |" in lost
    assert "| graft:lru | 2 | 0 | mean TTFT | 310 | stock:16: 300 | 1.03x |" in lost
    assert lost.index("12.86x") < lost.index("1.03x")
    assert "driver" not in text
    assert "GPU X" in text
    assert "12 < 50" in text


def test_repeats_are_one_row_with_their_median(results: Results) -> None:
    for seed, ttft in ((1, 100.0), (2, 200.0), (3, 130.0), (4, 150.0)):
        results.write(unit("graft:cost", 2.0, seed), result(ttft))
    cells = line(report(results.folder), "graft:cost", "2")
    assert cells[2] == "130 (120-150)"


def test_gates(results: Results) -> None:
    rows = [{"name": None, "length": 5, "ids": [1], "best": [[-0.5, -2.0]]}]
    other = [{"name": None, "length": 5, "ids": [2], "best": [[-0.5, -2.0]]}]
    itself = {"answers": 1, "equal": 1, "largest_gap_where_they_part": 0.0}
    itself |= {"mean_logprob_difference": 0.0, "tolerance": 0.25, "agree": True}
    for label, alone in (("stock:8", rows), ("graft:cost", other), ("base", rows)):
        engine = label.split(":")[0]
        gate = {"peer": {"label": label, "engine": engine}, "workload": "chat", "budget_gb": 12.0}
        gate |= {"dtype": "bfloat16", "alone": alone, "itself": itself}
        write_json(results.folder / "gates" / f"{engine}.json", gate)
    text = report(results.folder)
    assert "stock:8, graft:cost | 0 of 1 | 1.5000 (tolerance 0.25) | 0 | **no** |" in text
    assert "stock:8, base | 1 of 1" in text


def test_plots_are_written_and_shown(results: Results, tmp_path: Path) -> None:
    drawn = draw(results.folder, tmp_path / "plots")
    assert {path.name.rsplit("-", 1)[1] for path in drawn} == {"ttft.png", "cdf.png", "pool.png"}
    assert all(path.stat().st_size > 5000 for path in drawn)
    assert "![a](plots/a.png)" in report(results.folder, ["plots/a.png"])


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found none"):
        report(tmp_path)
