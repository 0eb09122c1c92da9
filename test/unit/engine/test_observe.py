"""What the scheduler loop notes for metrics."""

import pytest

from sglang_graft.engine.observe import Observations


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_passes_with_work_are_measured() -> None:
    clock = Clock()
    seen = Observations(now=clock)
    for at, busy in ((0.0, False), (5.0, True), (5.5, True), (5.75, False), (90.0, False)):
        clock.now = at
        seen.begin_pass(busy=busy)
    assert (seen.passes, seen.pass_seconds) == (2, 0.75)


def test_what_observers_cost_is_measured_too() -> None:
    clock = Clock()
    seen = Observations(now=clock)

    def question() -> dict[str, int]:
        clock.now += 0.25
        return {"pages": 7}

    assert seen.answer(question) == {"pages": 7}
    report = seen.report()
    assert (report["answers"], report["answer_seconds"]) == (1, 0.25)


def test_a_wait_lasts_from_the_first_pass_over_to_the_admission() -> None:
    clock = Clock()
    seen = Observations(now=clock)
    seen.held_back("a")
    clock.now = 2.0
    seen.held_back("a")
    seen.held_back("gone")
    assert seen.report()["held_back"] == 2
    seen.keep({"a", "b"})
    clock.now = 3.0
    seen.admitted("a", has_adapter=True)
    seen.admitted("b", has_adapter=True)
    seen.admitted("c", has_adapter=False)
    assert seen.report()["held_back"] == 0
    assert seen.wait_seconds.count == 2, "the one that did not wait counts as 0"
    assert seen.wait_seconds.sum == pytest.approx(3.0)
