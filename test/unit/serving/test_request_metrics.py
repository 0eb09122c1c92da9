"""Each request counts once, whatever its end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from sglang_graft.serving import request_metrics
from sglang_graft.serving.request_metrics import RequestCounts, discarded, finished, removed


class Manager:
    """The parts of SGLang's tokenizer manager that the hooks look at."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.child_rid_to_logical_rid: dict[str, str] = {}
        self.lora_ref_cache = {"legal": 1, "sales": 1}

    def add(self, rid: str, name: Any, *, log_metrics: bool = True, first: float = 0.5) -> Any:
        stats = SimpleNamespace(first_token_time=first, get_first_token_latency=lambda: first)
        obj = SimpleNamespace(rid=rid, lora_path=name, log_metrics=log_metrics)
        state = SimpleNamespace(obj=obj, time_stats=stats, lifecycle_id=rid)
        self.rid_to_state[rid] = state
        return state

    def _logical_rids(self, obj: Any) -> list[str]:
        return [obj.rid]


def remove(manager: Manager, rid: str, lifecycle_id: object | None = None) -> Any:
    state = manager.rid_to_state.pop(rid, None)
    manager.child_rid_to_logical_rid.pop(rid, None)
    return state


def end(manager: Manager, state: Any, reason: dict[str, Any], tokens: int = 3) -> None:
    """As SGLang does it: the state goes, then whoever waits sees the reason."""
    removed(remove, manager, state.obj.rid)
    out = {"meta_info": {"finish_reason": reason, "completion_tokens": tokens}}
    finished(manager, out, state, False)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> RequestCounts:
    made = RequestCounts(1)
    monkeypatch.setattr(request_metrics, "_counts", [made])
    return made


def test_answers(counts: RequestCounts) -> None:
    manager = Manager()
    for number, name in enumerate([None, "legal", "sales", "legal", "", ["legal"]]):
        end(manager, manager.add(str(number), name), {"type": "length"})
    assert counts.requests == {"(base)": 3, "legal": 2, "(other)": 1}
    assert {label: found.count for label, found in counts.ttft.items()} == counts.requests
    assert counts.ttft["legal"].sum == 1.0
    assert counts.errors == {}


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ({"type": "abort", "status_code": 400}, "bad_request"),
        ({"type": "abort", "status_code": 503}, "unavailable"),
        ({"type": "abort", "status_code": 500}, "internal"),
        ({"type": "abort"}, "aborted"),
    ],
)
def test_aborts_of_the_scheduler(counts: RequestCounts, reason: dict[str, Any], label: str) -> None:
    manager = Manager()
    end(manager, manager.add("r", "legal"), reason)
    assert (counts.requests, counts.errors) == ({"legal": 1}, {("legal", label): 1})
    assert counts.ttft == {}


@pytest.mark.parametrize(
    ("error", "label"),
    [
        (ValueError("too long"), "bad_request"),
        (HTTPException(404, "no such adapter"), "not_found"),
        (HTTPException(429, "slowly"), "too_many_requests"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (ValueError("Request is disconnected from the client side (type 1)."), "cancelled"),
        (RuntimeError("a fault of ours"), "internal"),
    ],
)
def test_exceptions_before_the_answer(
    counts: RequestCounts, error: BaseException, label: str
) -> None:
    manager = Manager()
    state = manager.add("r", "legal")
    try:
        raise error
    except BaseException:  # noqa: BLE001 (as SGLang calls it)
        discarded(manager, state.obj, {"r": "r"})
        removed(remove, manager, "r", "r")
        discarded(manager, state.obj, {"r": "r"})
    assert (counts.requests, counts.errors) == ({"legal": 1}, {("legal", label): 1})


def test_a_name_that_leads_nowhere_makes_no_label(counts: RequestCounts) -> None:
    manager = Manager()
    state = manager.add("r", "whatever a client sends")
    try:
        raise HTTPException(404, "unknown")
    except HTTPException:
        discarded(manager, state.obj)
    removed(remove, manager, "r")
    assert counts.requests == {"(unknown)": 1}
    assert counts.errors == {("(unknown)", "not_found"): 1}


def test_samples_are_one_request_with_several_first_tokens(counts: RequestCounts) -> None:
    manager = Manager()
    manager.add("all", "legal")
    for number in range(3):
        manager.child_rid_to_logical_rid[f"s{number}"] = "all"
        state = manager.add(f"s{number}", "legal")
        # The first one only fills the cache.
        end(manager, state, {"type": "length"}, tokens=number)
    removed(remove, manager, "all")
    assert counts.requests == {"legal": 1}
    assert counts.ttft["legal"].count == 2


def test_health_checks_and_what_is_gone_already_do_not_count(counts: RequestCounts) -> None:
    manager = Manager()
    end(manager, manager.add("HEALTH_CHECK", None, log_metrics=False), {"type": "length"})
    assert removed(remove, manager, "nobody") is None
    assert counts.requests == counts.errors == counts.ttft == {}


def test_a_name_that_loses_its_label_takes_its_counts_along(counts: RequestCounts) -> None:
    counts.ended("legal")
    counts.answered("legal", 0.1)
    counts.failed("legal", "internal")
    counts.failed("(base)", "internal")
    counts.labels.dropped("legal")
    report = counts.report()
    assert report == {"requests": {}, "errors": {("(base)", "internal"): 1}, "ttft": {}}
