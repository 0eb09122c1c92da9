"""The campaign of the committed results: what it names, and whether a lot fits on its device."""

from pathlib import Path

from sglang_graft.bench.campaign import read_campaign
from sglang_graft.bench.units import Results

BENCHMARK = Path(__file__).parents[3] / "benchmark"
# 1e9 bytes: an H200, the weights of the 8B shape, and graphs and workspaces of one server.
DEVICE_GB, WEIGHTS_GB, MORE_GB = 150.0, 16.1, 5.0


def test_it_has_every_unit_of_the_results_and_none_twice() -> None:
    _, lots = read_campaign(BENCHMARK / "campaigns" / "h200.toml")
    keys = [unit.key for lot in lots for plan in lot for unit in plan.units()]
    assert len(keys) == len(set(keys))
    assert set(Results(BENCHMARK / "results" / "h200").asked()) <= set(keys)


def test_every_lot_fits_on_the_device() -> None:
    _, lots = read_campaign(BENCHMARK / "campaigns" / "h200.toml")
    for number, lot in enumerate(lots):
        servers = {
            (place, unit.peer, unit.budget_gb)
            for place, plan in enumerate(lot)
            for unit in plan.units()
        }
        needed = sum(WEIGHTS_GB + MORE_GB + budget for _, _, budget in servers)
        assert needed <= DEVICE_GB, (number, needed)
