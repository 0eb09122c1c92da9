"""A lone prefill's result is processed before the next batch is made, if it is there."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_graft.engine.first_tokens import first


class Event:
    """The device's, over or not."""

    def __init__(self, over: bool) -> None:
        self.over = over
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.over


class Loop:
    """What the hook uses of a scheduler, and the order of what it does."""

    def __init__(self, event: Event | None, mode: ForwardMode = ForwardMode.EXTEND) -> None:
        self.enable_overlap = True
        self.chunked_req: object = None
        self.penalties = SimpleNamespace(is_required=False)
        sampling = SimpleNamespace(penalizer_orchestrator=self.penalties)
        self.last_batch: Any = SimpleNamespace(forward_mode=mode, sampling_info=sampling)
        self.running_batch: Any = None
        self.plan: Any = SimpleNamespace(running_batch="merged")
        self.result_queue = deque([("launched", SimpleNamespace(copy_done=event))])
        self.did: list[str] = []

    def process_batch_result(self, batch: str, result: Any) -> None:
        self.did.append("processed")

    def publish_load_snapshot(self, force: bool) -> None:
        assert force
        assert self.running_batch == "merged"  # what the snapshot counts
        self.did.append("published")

    def next_batch(self, *, running: bool = False) -> None:
        def original(itself: "Loop", running_batch: Any, last_batch: Any) -> Any:
            assert last_batch is not None
            assert itself.last_batch is last_batch  # what counts pages of running requests
            itself.did.append("made")
            return itself.plan

        batch = SimpleNamespace(is_empty=lambda: not running)
        assert first(original, self, batch, self.last_batch) is self.plan


@pytest.mark.parametrize("event", [None, Event(True)])
def test_a_result_that_is_there_is_processed_first(event: Event | None) -> None:
    loop = Loop(event)
    loop.next_batch()
    assert loop.did == ["processed", "made", "published"]
    assert not loop.result_queue
    assert loop.last_batch is None


def test_one_that_is_not_there_is_not_waited_for() -> None:
    event = Event(False)
    loop = Loop(event)
    loop.next_batch()
    assert loop.did == ["made"]
    assert len(loop.result_queue) == 1
    assert loop.last_batch is not None
    assert event.asked == 1


def test_nobody_else_is_kept_waiting() -> None:
    event = Event(True)
    loop = Loop(event)
    loop.next_batch(running=True)
    assert loop.did == ["made"]
    assert event.asked == 0


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.IDLE])
def test_only_prefills_have_first_tokens(mode: ForwardMode) -> None:
    loop = Loop(Event(True), mode)
    loop.next_batch()
    assert loop.did == ["made"]


def test_a_penalty_counts_the_first_token_when_sglang_does() -> None:
    loop = Loop(Event(True))
    loop.penalties.is_required = True
    loop.next_batch()
    assert loop.did == ["made"]


def test_an_embedding_has_no_penalties() -> None:
    loop = Loop(Event(True))
    loop.last_batch.sampling_info = None
    loop.next_batch()
    assert loop.did == ["processed", "made", "published"]


def test_a_chunk_of_a_prompt_has_none() -> None:
    loop = Loop(Event(True))
    loop.chunked_req = object()
    loop.next_batch()
    assert loop.did == ["made"]


def test_a_loop_without_overlap_has_processed_everything() -> None:
    loop = Loop(Event(True))
    loop.enable_overlap = False
    loop.next_batch()
    assert loop.did == ["made"]


def test_nothing_was_launched() -> None:
    loop = Loop(Event(True))
    loop.last_batch = None
    loop.result_queue.clear()
    assert first(lambda *_: "plan", loop, SimpleNamespace(is_empty=lambda: True), None) == "plan"
