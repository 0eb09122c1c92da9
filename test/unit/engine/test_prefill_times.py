"""Prefills are measured with their lengths and depths; nothing else is."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_graft.cache import RateMeter
from sglang_graft.engine import prefill_times

RUNNER = SimpleNamespace(device="cpu")


class Seen(RateMeter):
    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[tuple[list[tuple[int, int]], float]] = []

    def forward(self, prompts: Any, seconds: float) -> None:
        self.forwards.append((list(prompts), seconds))


@pytest.fixture
def meter() -> Iterator[Seen]:
    seen = Seen()
    prefill_times.measure_into(seen)
    yield seen
    prefill_times._meter.clear()


def batch(mode: ForwardMode) -> Any:
    return SimpleNamespace(
        forward_mode=mode, extend_seq_lens_cpu=[40, 7], extend_prefix_lens_cpu=[0, 32]
    )


def run(mode: ForwardMode) -> Any:
    return prefill_times.forward(lambda runner, b, **rest: rest, RUNNER, batch(mode), split=2)


def test_a_prefill_is_measured(meter: Seen) -> None:
    assert run(ForwardMode.EXTEND) == {"split": 2}
    [(prompts, seconds)] = meter.forwards
    assert prompts == [(40, 0), (7, 32)]
    assert seconds > 0


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.IDLE])
def test_other_forwards_are_not(meter: Seen, mode: ForwardMode) -> None:
    run(mode)
    assert not meter.forwards


def test_nothing_is_measured_before_the_tree_exists() -> None:
    assert run(ForwardMode.EXTEND) == {"split": 2}


class Event:
    def __init__(self, at_ms: float, over: bool) -> None:
        self.at_ms, self.over = at_ms, over

    def query(self) -> bool:
        return self.over

    def elapsed_time(self, end: "Event") -> float:
        return end.at_ms - self.at_ms


def test_events_are_read_in_order_once_they_are_over(meter: Seen) -> None:
    first, second = Event(12.0, True), Event(30.0, False)
    prefill_times._pending.extend(
        [(Event(2.0, True), first, [(5, 0)]), (Event(20.0, True), second, [(6, 0)])]
    )
    prefill_times.collect()
    assert meter.forwards == [([(5, 0)], pytest.approx(0.01))]
    second.over = True
    prefill_times.collect()
    assert len(meter.forwards) == 2
