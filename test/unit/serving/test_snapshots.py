"""One question at a time, and an answer within a bound."""

import asyncio
from typing import Any

import pytest

from sglang_graft.serving.snapshots import Latest, Snapshots


class Scheduler:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def __call__(self) -> dict[str, Any]:
        self.asked += 1
        number = self.asked
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return {"number": number}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_scheduler_that_answers() -> None:
    async def main() -> None:
        found = Snapshots(Scheduler(), now=Clock())
        assert await found.latest() == Latest({"number": 1}, 0.0, False)
        assert await found.latest() == Latest({"number": 2}, 0.0, False)

    asyncio.run(main())


def test_a_hung_scheduler_is_asked_once_and_its_last_answer_is_given() -> None:
    async def main() -> None:
        scheduler, clock = Scheduler(), Clock()
        found = Snapshots(scheduler, patience=0.01, now=clock)
        await found.latest()
        scheduler.gate.clear()
        for now in (30.0, 45.0):
            clock.now = now
            assert await found.latest() == Latest({"number": 1}, now, True)
        assert scheduler.asked == 2, "the question of the first time is still open"
        scheduler.gate.set()
        await asyncio.sleep(0)
        assert (await found.latest()).stale is False

    asyncio.run(main())


def test_a_scheduler_that_never_answered() -> None:
    async def main() -> None:
        scheduler, clock = Scheduler(), Clock()
        scheduler.gate.clear()
        found = Snapshots(scheduler, patience=0.01, now=clock)
        clock.now = 5.0
        assert await found.latest() == Latest(None, 5.0, True)
        scheduler.gate.set()
        await found.latest()

    asyncio.run(main())


def test_those_who_ask_at_once_share_an_answer() -> None:
    async def main() -> None:
        scheduler = Scheduler()
        found = Snapshots(scheduler)
        answers = await asyncio.gather(*(found.latest() for _ in range(5)))
        assert {answer.data["number"] for answer in answers if answer.data} == {1}
        assert scheduler.asked == 1

    asyncio.run(main())


def test_a_young_answer_is_given_again() -> None:
    async def main() -> None:
        scheduler, clock = Scheduler(), Clock()
        found = Snapshots(scheduler, reuse=0.5, now=clock)
        await found.latest()
        clock.now = 0.4
        assert await found.latest() == Latest({"number": 1}, 0.4, False)
        clock.now = 0.5
        assert await found.latest() == Latest({"number": 2}, 0.0, False)

    asyncio.run(main())


def test_an_error_is_the_callers_and_the_next_one_asks_again() -> None:
    async def main() -> None:
        scheduler = Scheduler()
        scheduler.error = ValueError("no")
        found = Snapshots(scheduler)
        with pytest.raises(ValueError, match="no"):
            await found.latest()
        scheduler.error = None
        assert (await found.latest()).data == {"number": 2}

    asyncio.run(main())
