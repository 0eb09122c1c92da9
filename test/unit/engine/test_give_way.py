"""An idle loop stands still for a moment while threads read; a busy one does not."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_graft.engine import background_load, give_way, waiting
from sglang_graft.engine.background_load import Loads


def scheduler(*, running: bool = False, last: object = None, paused: bool = False) -> Any:
    return SimpleNamespace(
        running_batch=SimpleNamespace(is_empty=lambda: not running),
        last_batch=last,
        _engine_paused=paused,
    )


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(give_way.time, "sleep", found.append)
    return found


def test_only_an_idle_loop_stands_still(slept: list[float]) -> None:
    give_way.give_way(scheduler(running=True))
    give_way.give_way(scheduler(last=object()))
    assert slept == []
    give_way.give_way(scheduler())
    assert slept == [give_way.TURN_SECONDS]
    give_way.give_way(scheduler(running=True, last=object(), paused=True))
    assert slept == [give_way.TURN_SECONDS] * 2


@pytest.mark.parametrize("reading", [True, False])
def test_a_pass_gives_way_while_an_image_is_read(
    reading: bool, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = SimpleNamespace(begin_pass=lambda **_: None, enabled=False, choose=lambda q: q)
    cache = SimpleNamespace(
        observed=nothing,
        tenancy=nothing,
        pool=SimpleNamespace(ledger=SimpleNamespace(reserve=0)),
        waiting=SimpleNamespace(step=lambda queue: None),
        tiers=SimpleNamespace(is_reading=reading),
        check_now=lambda: None,
    )
    idle = scheduler()
    idle.running_batch.reqs = []
    idle.__dict__.update(tree_cache=cache, waiting_queue=[], chunked_req=None, device="cpu")
    waiting.begin_pass(idle, None, idle.running_batch)
    assert bool(slept) is reading


def test_a_turn_gives_way_while_a_load_is_read(
    slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads()
    monkeypatch.setattr(background_load, "_loads", loads)
    background_load.finish(scheduler(), [])
    assert slept == []
    loads._jobs.append((None, SimpleNamespace(done=lambda: False)))  # type: ignore[arg-type]
    background_load.finish(scheduler(), [])
    assert slept == [give_way.TURN_SECONDS]
