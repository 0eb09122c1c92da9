"""Loads cut workloads by time; units are files that are measured once."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_graft.bench.peers import parse_peers
from sglang_graft.bench.units import FORMAT, Load, Results, Unit

LOAD = Load(name="chat", rate=3.0, seconds=10.0, seed=2)


def unit(label: str = "base", load: Load = LOAD, budget_gb: float = 6.0) -> Unit:
    return Unit(peer=parse_peers([label])[0], load=load, budget_gb=budget_gb)


def test_a_load_ends_with_its_time_and_longer_ones_begin_alike() -> None:
    short = LOAD.workload().requests
    long = Load(name="chat", rate=3.0, seconds=400.0, seed=2).workload().requests
    assert long[: len(short)] == short
    assert max(r.arrival_s for r in short) < 10.0 <= long[len(short)].arrival_s
    assert max(r.arrival_s for r in long) > 390.0
    assert len(short) % 4 == 0  # whole conversations


@pytest.mark.parametrize("name", ["uniform-cold", "translation", "agents", "swing", "many"])
def test_every_workload_can_be_cut(name: str) -> None:
    workload = Load(name=name, rate=None, seconds=70.0).workload()
    assert workload.requests
    assert all(r.previous is None or r.previous < i for i, r in enumerate(workload.requests))


def test_a_bound_on_requests() -> None:
    assert len(Load(name="chat", rate=3.0, seconds=1e9, most=30).workload().requests) == 30
    with pytest.raises(ValueError, match="--seconds"):
        Load(name="chat", rate=1e-3, seconds=0.1).workload()


def test_keys_tell_units_apart() -> None:
    units = [
        unit(),
        unit("graft:cost"),
        unit("graft:cost+no-prefetch"),
        unit(budget_gb=12.0),
        unit(load=Load(name="agents", rate=3.0, seconds=10.0, seed=2)),
        unit(load=Load(name="chat", rate=None, seconds=10.0, seed=2)),
        unit(load=Load(name="chat", rate=3.5, seconds=10.0, seed=2)),
        unit(load=Load(name="chat", rate=3.0, seconds=11.0, seed=2)),
        unit(load=Load(name="chat", rate=3.0, seconds=10.0, seed=3)),
        unit(load=Load(name="chat", rate=3.0, seconds=10.0, seed=2, adapters=8)),
        unit(load=Load(name="chat", rate=3.0, seconds=10.0, seed=2, most=8)),
    ]
    assert len({u.key for u in units}) == len(units)


def test_a_finished_unit_is_known(tmp_path: Path) -> None:
    results = Results(tmp_path)
    assert not results.finished(unit())
    results.write(unit(), {"status": "measured"})
    assert results.finished(unit())
    assert results.status(unit()) == "measured"
    assert not results.finished(unit("graft:cost"))
    (found,) = results.read_some()
    assert found["unit"]["peer"]["label"] == "base"
    assert Load(**found["unit"]["load"]) == LOAD
    path = results.path(unit())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT - 1}))
    assert not results.finished(unit())
    with pytest.raises(ValueError, match="found none"):
        results.read_some()


def test_what_was_asked_is_remembered(tmp_path: Path) -> None:
    results = Results(tmp_path)
    assert results.asked() == {}
    results.ask([unit()])
    results.ask([unit("graft:cost"), unit()])
    assert set(results.asked()) == {unit().key, unit("graft:cost").key}


def test_runs_that_share_a_folder_lose_nothing_of_each_other(tmp_path: Path) -> None:
    asked = [unit(budget_gb=float(size)) for size in range(1, 41)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda one: Results(tmp_path).ask([one]), asked))
    assert set(Results(tmp_path).asked()) == {one.key for one in asked}
    assert not list(tmp_path.glob("*.part"))
