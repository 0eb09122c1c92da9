"""Operations of the scheduler, asked for from the HTTP process."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import GetInternalStateReqOutput

from sglang_graft.engine import control as engine
from sglang_graft.serving.control import RefusedOperationError, ask


class Scheduler:
    """Answers each message with its own text, when told to."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.communicator: Any = FanOutCommunicator(lambda obj: self.sent.append(obj.rid), 1)
        self.manager = SimpleNamespace(
            get_internal_state_communicator=self.communicator, auto_create_handle_loop=lambda: None
        )

    def reply(self, key: str = engine.REPLY) -> None:
        state = {key: {"to": self.sent.pop(0)} if key == engine.REPLY else "no room"}
        self.communicator.handle_recv(GetInternalStateReqOutput(internal_state=state))


def test_a_caller_that_gives_up_leaves_no_answer_to_the_next_one() -> None:
    async def scenario() -> None:
        scheduler = Scheduler()
        first = asyncio.create_task(ask(scheduler.manager, "first"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        second = asyncio.create_task(ask(scheduler.manager, "second", pages=2))
        await asyncio.sleep(0.01)
        scheduler.reply()
        await asyncio.sleep(0.01)
        assert not second.done(), "that was the answer to the first"
        scheduler.reply()
        assert (await second)["to"] == engine.message("second", {"pages": 2}).rid
        assert first.cancelled()

    asyncio.run(scenario())


def test_a_refusal_is_raised() -> None:
    async def scenario() -> None:
        scheduler = Scheduler()
        asked = asyncio.create_task(ask(scheduler.manager, "load"))
        await asyncio.sleep(0.01)
        scheduler.reply(engine.ERROR)
        with pytest.raises(RefusedOperationError, match="no room"):
            await asked

    asyncio.run(scenario())
