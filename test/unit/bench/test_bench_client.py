"""The client against a server that streams as SGLang does."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from helpers_bench import FakeServer, serving

from sglang_graft.bench.client import Answer, HttpClient
from sglang_graft.bench.clock import RealClock


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with serving(FakeServer()) as running:
        yield running


def ask(url: str, adapter: str | None = "adapter-0", tokens: int = 6) -> Answer:
    async def once() -> Answer:
        async with httpx.AsyncClient(base_url=url) as client:
            answer = Answer()
            await HttpClient(client, RealClock())([1, 2, 3], adapter, tokens, answer)
            return answer

    return asyncio.run(once())


def test_an_answer_with_the_time_of_every_event(server: FakeServer) -> None:
    answer = ask(server.url)
    assert answer.error == ""
    assert answer.tokens == [6, 7, 8, 9, 10, 11]
    assert answer.cached == 3
    assert [tokens for _, tokens in answer.arrivals] == [1, 3, 5, 6]
    times = [when for when, _ in answer.arrivals]
    assert times == sorted(times)
    body = server.bodies[-1]
    assert body["lora_path"] == "adapter-0"
    assert body["stream"]
    assert body["sampling_params"] == {
        "temperature": 0,
        "max_new_tokens": 6,
        "ignore_eos": True,
    }


def test_the_base_model_is_named_by_nothing(server: FakeServer) -> None:
    assert ask(server.url, None).error == ""
    assert "lora_path" not in server.bodies[-1]


@pytest.mark.parametrize(
    ("failure", "message"),
    [("status", "status 400"), ("event", "broken"), ("short", "wanted 6 tokens, got 5")],
)
def test_failures_are_answers(server: FakeServer, failure: str, message: str) -> None:
    server.failures.append(failure)
    assert message in ask(server.url).error
    assert ask(server.url).error == ""


def test_who_cancels_keeps_the_arrivals(server: FakeServer) -> None:
    """The server sends two events of the answer and then nothing more."""
    server.failures.append("hang")
    answer = Answer()

    async def cut() -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            send = HttpClient(client, RealClock())
            task = asyncio.create_task(send([1, 2, 3], "adapter-0", 6, answer))
            while len(answer.arrivals) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cut())
    assert [tokens for _, tokens in answer.arrivals] == [1, 3]


def test_nobody_listens() -> None:
    assert "ConnectError" in ask("http://127.0.0.1:9").error
