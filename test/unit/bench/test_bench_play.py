"""Open-loop timing, by a clock that only the test moves."""

import asyncio
from collections.abc import Callable

import pytest
from helpers_bench import MovedClock, played

from sglang_graft.bench.client import Answer
from sglang_graft.bench.play import UNFINISHED, Player, Record, token_ids
from sglang_graft.sim.workloads import (
    FIRST_TOKEN,
    SMALLEST_VOCABULARY,
    AdapterSpec,
    Request,
    Segment,
    Workload,
)

ADAPTERS = (AdapterSpec("one", 8), AdapterSpec("two", 8))
SYSTEM, ASKED, AGAIN = Segment(1, 5), Segment(2, 3), Segment(3, 2)
ANSWER, SECOND = Segment(10, 4, generated=True), Segment(11, 2, generated=True)
SESSION = (
    Request(0, (SYSTEM, ASKED), ANSWER, 2.0),
    Request(0, (SYSTEM, ASKED, ANSWER, AGAIN), SECOND, 2.0, previous=0, think_s=3.0),
)
OTHER = Request(1, (Segment(4, 6),), Segment(12, 2, generated=True), 2.5)


class Slow:
    """Takes `wait` seconds to the first token and one for each further one."""

    def __init__(self, clock: MovedClock, wait: Callable[[int], float]) -> None:
        self.clock, self.wait = clock, wait
        self.sent: list[tuple[float, list[int], str | None]] = []

    async def __call__(
        self, prompt: list[int], adapter: str | None, new_tokens: int, answer: Answer
    ) -> None:
        self.sent.append((self.clock.now() - 100.0, prompt, adapter))
        answer.cached = 1
        start = self.clock.now() + self.wait(len(self.sent))
        for step in range(new_tokens):
            await self.clock.sleep_until(start + step)
            answer.arrivals.append((self.clock.now(), step + 1))
        answer.tokens = [9000 + step for step in range(new_tokens)]


def play(
    requests: tuple[Request, ...], wait: Callable[[int], float] = lambda n: 1.0, **more: object
) -> tuple[list[Record], Slow]:
    clock = MovedClock()
    send = Slow(clock, wait)
    limit = float(more.pop("limit", 1000.0))  # type: ignore[arg-type]
    player = Player(
        Workload("tiny", 0, ADAPTERS, requests),
        send,
        clock,
        SMALLEST_VOCABULARY,
        **more,  # type: ignore[arg-type]
    )
    return played(clock, player.play(limit)), send


def test_first_turns_come_on_time_whatever_the_server_does() -> None:
    requests = tuple(
        Request(i % 2, (Segment(20 + i, 4),), Segment(40 + i, 2, generated=True), float(i))
        for i in range(5)
    )
    records, send = play(requests, wait=lambda n: 50.0)
    assert [when for when, _, _ in send.sent] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [r.ttft_s for r in records] == [50.0] * 5
    assert [r.gaps_s for r in records] == [[1.0]] * 5


def test_a_later_turn_comes_after_the_think_time_with_the_servers_own_answer() -> None:
    records, send = play((*SESSION, OTHER))
    # 2.0 s, first token at 3.0, the fourth at 6.0, think 3 s.
    assert [(r.index, r.due_s, r.sent_s) for r in records] == [
        (0, 2.0, 2.0),
        (1, 9.0, 9.0),
        (2, 2.5, 2.5),
    ]
    prompts = {when: (prompt, adapter) for when, prompt, adapter in send.sent}
    first, adapter = prompts[2.0]
    assert adapter == "one"
    again, _ = prompts[9.0]
    real = [9000, 9001, 9002, 9003]
    assert again == first + real + token_ids(AGAIN, SMALLEST_VOCABULARY)
    assert records[0].end_s == 6.0
    assert prompts[2.5][1] == "two"
    assert [r.prompt for r in records] == [8, 14, 6]


def test_the_clients_own_delay_counts_into_ttft() -> None:
    clock = MovedClock()
    send = Slow(clock, lambda n: 1.0)
    player = Player(Workload("tiny", 0, ADAPTERS, (OTHER,)), send, clock, SMALLEST_VOCABULARY)

    async def late() -> list[Record]:
        task = asyncio.ensure_future(player.play(1000.0))
        await asyncio.sleep(0)
        clock._now += 4.0  # the process was away while the request became due at 2.5
        return await task

    (record,) = played(clock, late())
    assert (record.due_s, record.sent_s) == (2.5, 4.0)
    assert record.ttft_s == 2.5


def test_what_has_not_ended_in_time_is_kept_as_unfinished() -> None:
    records, _ = play((*SESSION, OTHER), wait=lambda n: 100.0 if n == 1 else 1.0, limit=20.0)
    assert [(r.index, r.error) for r in records] == [(0, UNFINISHED), (2, "")]
    assert records[0].ttft_s is None
    assert records[0].waited_s == 18.0


def test_what_was_cut_amid_its_answer_keeps_its_first_token() -> None:
    records, _ = play(SESSION, limit=4.5)  # tokens come at 3, 4, 5 and 6
    assert [(r.error, r.ttft_s, r.gaps_s) for r in records] == [(UNFINISHED, 1.0, [1.0])]
    assert (records[0].waited_s, records[0].end_s, records[0].tokens) == (2.5, 4.0, 2)


def test_a_failed_turn_ends_its_conversation_alone() -> None:
    class Failing(Slow):
        async def __call__(
            self, prompt: list[int], adapter: str | None, new_tokens: int, answer: Answer
        ) -> None:
            await super().__call__(prompt, adapter, new_tokens, answer)
            answer.error = "broken" if adapter == "one" else ""

    clock = MovedClock()
    send = Failing(clock, lambda n: 1.0)
    workload = Workload("tiny", 0, ADAPTERS, (*SESSION, OTHER))
    records = played(clock, Player(workload, send, clock, SMALLEST_VOCABULARY).play(99.0))
    assert [(r.index, r.error) for r in records] == [(0, "broken"), (2, "")]


def test_base_traffic_names_no_adapter() -> None:
    _, send = play((*SESSION, OTHER), base_traffic=True)
    assert {adapter for _, _, adapter in send.sent} == {None}


def test_an_error_of_our_own_is_not_a_measurement() -> None:
    clock = MovedClock()

    async def broken(
        prompt: list[int], adapter: str | None, new_tokens: int, answer: Answer
    ) -> None:
        raise KeyError("ours")

    player = Player(Workload("tiny", 0, ADAPTERS, (OTHER,)), broken, clock, SMALLEST_VOCABULARY)
    with pytest.raises(KeyError, match="ours"):
        played(clock, player.play(99.0))


def test_several_tokens_in_one_event_share_its_time() -> None:
    clock = MovedClock()

    async def lumps(
        prompt: list[int], adapter: str | None, new_tokens: int, answer: Answer
    ) -> None:
        now = clock.now()
        await clock.sleep_until(now + 7)
        answer.arrivals += [(now + 1, 1), (now + 7, 4)]
        answer.tokens = [1, 2, 3, 4]

    request = Request(0, (ASKED,), ANSWER, 0.0)
    player = Player(Workload("tiny", 0, ADAPTERS, (request,)), lumps, clock, SMALLEST_VOCABULARY)
    (record,) = played(clock, player.play(99.0))
    assert record.ttft_s == 1.0
    assert record.gaps_s == [2.0, 2.0, 2.0]


def test_tokens_are_folded_into_a_small_vocabulary() -> None:
    segment = Segment(7, 300)
    assert token_ids(segment, SMALLEST_VOCABULARY) == segment.tokens().tolist()
    small = token_ids(segment, 512)
    assert min(small) >= FIRST_TOKEN
    assert max(small) < 512
    assert small != token_ids(Segment(8, 300), 512)
    with pytest.raises(ValueError, match="vocabulary"):
        token_ids(segment, 300)
