"""A flush waits for what ends anyway, and is refused for what goes on."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput
from sglang.srt.managers.scheduler_components.flush_wrapper import SchedulerFlushWrapper

from sglang_graft.engine.flush import handle


class Request:
    def __init__(self, rid: str = "r", *, ended: bool = False, aborted: bool = False) -> None:
        self.rid, self.ended, self.to_finish = rid, ended, aborted

    def finished(self) -> bool:
        return self.ended


class Scheduler:
    """As much of SGLang's scheduler as a flush looks at; idle when it holds no request."""

    def __init__(self, **held: Any) -> None:
        self.running_batch = SimpleNamespace(reqs=held.get("running", []))
        self.last_batch = SimpleNamespace(reqs=held["last"]) if "last" in held else None
        self.waiting_queue = held.get("waiting", [])
        self.grammar_manager = SimpleNamespace(grammar_queue=held.get("grammar", []))
        self.chunked_req = held.get("chunked")
        self._pending_chunked_abort_req = held.get("aborted_chunk")
        self._engine_paused = held.get("paused", False)
        self.idle = not held
        self.flushes = 0
        self.sent: list[Any] = []

    def is_fully_idle(self) -> bool:
        return self.idle

    def flush_cache(self) -> bool:
        self.flushes += self.idle
        return self.idle

    def send_output(self, output: Any, request: Any) -> None:
        self.sent.append(output)


def wrapper(scheduler: Scheduler) -> Any:
    return SchedulerFlushWrapper(
        flush_cache=scheduler.flush_cache,
        is_fully_idle=scheduler.is_fully_idle,
        ipc_channels=SimpleNamespace(send_to_tokenizer=scheduler),  # type: ignore[arg-type]
    )


def ask(one: Any, timeout_s: float | None = None) -> FlushCacheReqOutput | None:
    result: FlushCacheReqOutput | None = handle(
        SchedulerFlushWrapper.handle, one, FlushCacheReqInput(timeout_s=timeout_s)
    )
    return result


def test_an_idle_server_is_flushed_at_once() -> None:
    scheduler = Scheduler()
    answer = ask(wrapper(scheduler))
    assert answer is not None
    assert answer.success
    assert scheduler.flushes == 1


CHUNK = Request()
ENDING = [
    {"last": [Request(ended=True)]},
    {"running": [Request(ended=True), Request(aborted=True)]},
    {"waiting": [Request(aborted=True)]},
    {"running": [Request(HEALTH_CHECK_RID_PREFIX + "_1")]},
    {"chunked": CHUNK, "aborted_chunk": CHUNK},
]


@pytest.mark.parametrize("held", ENDING)
def test_what_ends_anyway_is_waited_for(held: dict[str, Any]) -> None:
    scheduler = Scheduler(**held)
    one = wrapper(scheduler)
    assert ask(one) is None
    one.check_pending()
    assert not scheduler.sent
    scheduler.idle = True
    one.check_pending()
    assert [answer.success for answer in scheduler.sent] == [True]
    assert scheduler.flushes == 1


TWICE = Request("in two places")
GOING_ON = [
    ({"running": [Request(), Request(ended=True)]}, "1 requests are running and 0 are waiting"),
    ({"running": [TWICE], "last": [TWICE]}, "1 requests are running and 0 are waiting"),
    ({"chunked": Request()}, "1 requests are running and 0 are waiting"),
    ({"waiting": [Request()], "grammar": [Request()]}, "0 requests are running and 2 are waiting"),
]


@pytest.mark.parametrize(("held", "message"), GOING_ON)
def test_what_goes_on_is_counted_in_the_refusal(held: dict[str, Any], message: str) -> None:
    scheduler = Scheduler(**held)
    answer = ask(wrapper(scheduler))
    assert answer is not None
    assert not answer.success
    assert message in answer.message
    assert "/flush_cache?timeout=" in answer.message


def test_a_timeout_waits_for_running_requests_too() -> None:
    scheduler = Scheduler(running=[Request()])
    one = wrapper(scheduler)
    assert ask(one, timeout_s=1000) is None
    scheduler.idle = True
    one.check_pending()
    assert [answer.success for answer in scheduler.sent] == [True]


def test_a_paused_server_cannot_wait() -> None:
    scheduler = Scheduler(last=[Request(ended=True)], paused=True)
    answer = ask(wrapper(scheduler))
    assert answer is not None
    assert not answer.success
