"""One line for each request that has ended, whatever its end; nothing that a client wrote."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from sglang_graft.serving import request_log
from sglang_graft.serving.names import UnknownAdapterError
from sglang_graft.serving.request_id import ATTRIBUTE

OPENED: list[request_log.RequestLog] = []


class Manager:
    """The parts of SGLang's tokenizer manager that the log reads."""

    def __init__(self, log: Path | None, identities: dict[str, str] | None = None) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.child_rid_to_logical_rid: dict[str, str] = {}
        self.logical_rid_to_child_rids: dict[str, set[str]] = {}
        self.asked = 0
        if log is not None:

            async def ask() -> dict[str, str]:
                self.asked += 1
                await asyncio.sleep(0)
                return identities or {}

            made = request_log.RequestLog(str(log), ask)
            OPENED.append(made)
            setattr(self, request_log.LOG_ATTRIBUTE, made)

    def _logical_rids(self, obj: Any) -> list[str]:
        return [obj.rid]

    def add(
        self, rid: str, adapter: str | None = None, *, first: float = 0.5, stream: bool = True
    ) -> Any:
        obj = SimpleNamespace(rid=rid, lora_path=adapter, lora_id=adapter and f"id-{adapter}")
        obj.text, obj.stream = "a secret prompt", stream
        times = SimpleNamespace(created_time=0.25, first_token_time=first)
        state = SimpleNamespace(obj=obj, time_stats=times, lifecycle_id=rid, output_ids=[1, 2])
        self.rid_to_state[rid] = state
        return state


def batch(rids: list[str], reasons: list[Any]) -> SimpleNamespace:
    n = len(rids)
    return SimpleNamespace(
        rids=rids,
        finished_reasons=reasons,
        prompt_tokens=[10] * n,
        cached_tokens=[8] * n,
        completion_tokens=[3] * n,
    )


def lines(log: Path) -> list[dict[str, Any]]:
    text = log.read_text()
    assert "secret" not in text
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "requests.log"
    while OPENED:
        OPENED.pop().close()


def test_a_finished_request(log: Path) -> None:
    manager = Manager(log)
    setattr(manager.add("r"), ATTRIBUTE, "trace-1")
    manager.add("running")
    request_log.finished(manager, batch(["r", "running", "gone"], [{"type": "stop"}, None, None]))
    (line,) = lines(log)
    assert line["ttft_s"] == 0.25
    assert line["total_s"] > 0
    del line["time"], line["ttft_s"], line["total_s"]
    assert line == {
        "event": "request",
        "id": "r",
        "request_id": "trace-1",
        "parent": None,
        "adapter": None,
        "identity": None,
        "stream": True,
        "prompt_tokens": 10,
        "cached_tokens": 8,
        "completion_tokens": 3,
        "finish": "stop",
        "status": 200,
        "error": None,
    }


def test_the_first_tokens_may_be_the_last(log: Path) -> None:
    manager = Manager(log)
    manager.add("r", first=0.0)
    request_log.finished(manager, batch(["r"], [{"type": "length"}]))
    manager.add("whole", stream=False)
    request_log.finished(manager, batch(["whole"], [{"type": "length"}]))
    streamed, whole = lines(log)
    assert streamed["ttft_s"] == streamed["total_s"]
    assert whole["ttft_s"] is None


def test_identities_are_asked_for_once(log: Path) -> None:
    async def run() -> None:
        manager = Manager(log, {"id-a": "hash-a", "id-b": "hash-b"})
        for rid, adapter in (("1", "a"), ("2", "b"), ("3", None)):
            manager.add(rid, adapter)
        request_log.finished(manager, batch(["1", "2", "3"], [{"type": "stop"}] * 3))
        await request_log.flush(manager)
        manager.add("4", "a")
        request_log.finished(manager, batch(["4"], [{"type": "stop"}]))
        manager.add("5", "unloaded")
        request_log.finished(manager, batch(["5"], [{"type": "stop"}]))
        await request_log.flush(manager)
        assert manager.asked == 2

    asyncio.run(run())
    found = {line["id"]: (line["adapter"], line["identity"]) for line in lines(log)}
    assert found == {
        "1": ("a", "hash-a"),
        "2": ("b", "hash-b"),
        "3": (None, None),
        "4": ("a", "hash-a"),
        "5": ("unloaded", None),
    }


def test_requests_that_the_scheduler_ends(log: Path) -> None:
    manager = Manager(log)
    for rid in "abcd":
        manager.add(rid)
    reason = {"type": "abort", "message": "too\nlong", "status_code": 400}
    request_log.finished(manager, batch(["a", "b"], [reason, {"type": "abort"}]))
    gone = SimpleNamespace(rid="c", finished_reason=None, abort_message="queue is full")
    request_log.aborted(manager, gone)
    over = SimpleNamespace(rid="d", finished_reason=reason, abort_message=None)
    request_log.aborted(manager, over)
    request_log.aborted(manager, SimpleNamespace(rid="gone", finished_reason=None))
    found = [(line["finish"], line["status"], line["error"]) for line in lines(log)]
    assert found == [
        ("abort", 400, "too long"),
        ("abort", 499, ""),
        ("abort", 499, "queue is full"),
        ("abort", 400, "too long"),
    ]
    assert lines(log)[2]["prompt_tokens"] is None
    assert lines(log)[2]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ValueError("wrong"), ("wrong", 400)),
        (UnknownAdapterError("no x"), ("no x", 404)),
        (HTTPException(503, "later"), ("later", 503)),
        (asyncio.CancelledError(), ("the client has left", 499)),
        (GeneratorExit(), ("the client has left", 499)),
        (ValueError("Request is disconnected (type 1)"), ("the client has left", 499)),
        (KeyError("a secret prompt"), ("KeyError", 500)),
        (ValueError("x" * 1000), ("x" * request_log.ERROR_LENGTH, 400)),
    ],
)
def test_requests_that_end_with_an_error(
    log: Path, error: BaseException, wanted: tuple[str, int]
) -> None:
    manager = Manager(log)
    obj = manager.add("r").obj
    manager.add("r_child")
    manager.rid_to_state["r_child"].lifecycle_id = "r"
    manager.logical_rid_to_child_rids["r"] = {"r_child", "gone"}
    manager.child_rid_to_logical_rid["r_child"] = "r"
    try:
        raise error
    except BaseException:  # noqa: BLE001 (as SGLang does)
        request_log.discarded(manager, obj, {"r": "r"})
        request_log.discarded(manager, obj, {"r": "a later request with the same id"})
    found = {line["id"]: line for line in lines(log)}
    assert len(lines(log)) == 2
    assert all((line["error"], line["status"]) == wanted for line in found.values())
    assert (found["r"]["parent"], found["r_child"]["parent"]) == (None, "r")
    assert {line["finish"] for line in found.values()} == {"error"}


def test_health_checks_and_servers_without_a_log(log: Path) -> None:
    manager = Manager(log)
    manager.add("HEALTH_CHECK_1")
    request_log.finished(manager, batch(["HEALTH_CHECK_1"], [{"type": "stop"}]))
    assert lines(log) == []
    silent = Manager(None)
    silent.add("r")
    request_log.finished(silent, batch(["r"], [{"type": "stop"}]))
    asyncio.run(request_log.flush(silent))


def test_a_log_that_was_moved_away_is_opened_anew(log: Path) -> None:
    manager = Manager(log)
    for rid in "ab":
        manager.add(rid)
        request_log.finished(manager, batch([rid], [{"type": "stop"}]))
        assert lines(log)[-1]["id"] == rid
        log.rename(log.with_suffix(f".{rid}"))


def test_targets_that_cannot_be_written(tmp_path: Path) -> None:
    for good in ("", "stderr", str(tmp_path / "new.log"), "relative.log"):
        request_log.check_target(good)
    for wrong in (tmp_path, tmp_path / "no" / "folder.log"):
        with pytest.raises(ValueError, match=r"--graft-request-log: wanted 'stderr' or a file"):
            request_log.check_target(str(wrong))
    with pytest.raises(ValueError, match=r"--graft-request-log: .*: Is a directory"):
        request_log.start(SimpleNamespace(), str(tmp_path))


def test_a_request_that_was_turned_away_has_the_same_fields(log: Path) -> None:
    manager = Manager(log)
    manager.add("r")
    request_log.finished(manager, batch(["r"], [{"type": "stop"}]))
    request_log.turned_away(manager, "nobody", 404, "No adapter named 'nobody'")
    answered, refused = lines(log)
    assert refused.keys() == answered.keys()
    assert (refused["adapter"], refused["status"]) == ("nobody", 404)
    assert (refused["finish"], refused["error"]) == ("error", "No adapter named 'nobody'")
    request_log.turned_away(Manager(None), "nobody", 404, "where nobody wants a log")
