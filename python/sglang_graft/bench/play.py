"""A workload against a server, open-loop: first turns come when the workload says, whatever the
server does; a later turn comes its think time after the answer before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_graft.bench.client import Answer, Send
from sglang_graft.bench.clock import Clock
from sglang_graft.sim.workloads import FIRST_TOKEN, SMALLEST_VOCABULARY, Request, Segment, Workload

UNFINISHED = "unfinished"


@dataclass(slots=True)
class Record:
    """One request; times are seconds since the start of the play.

    due_s: when it should have been sent; sent_s: when it was (the client's own delay is between).
    gaps_s: time for each token after the first. ttft_s: None when no token came. waited_s: how
    long it took, or had waited when it failed or the play was ended. cached: 0 when it was cut.
    """

    index: int
    adapter: int
    prompt: int
    output: int
    due_s: float
    sent_s: float
    end_s: float = 0.0
    ttft_s: float | None = None
    waited_s: float = 0.0
    cached: int = 0
    tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    error: str = ""


@dataclass(slots=True)
class Player:
    """Plays one workload once. base_traffic: every request asks the base model instead."""

    workload: Workload
    send: Send
    clock: Clock
    vocabulary: int
    base_traffic: bool = False
    done: Callable[[Record], None] = lambda record: None
    records: list[Record] = field(default_factory=list)
    _answers: dict[int, list[int]] = field(default_factory=dict)
    _cut: dict[Segment, list[int]] = field(default_factory=dict)
    _next: dict[int, list[int]] = field(default_factory=dict)
    _start: float = 0.0

    def __post_init__(self) -> None:
        for index, request in enumerate(self.workload.requests):
            if request.previous is not None:
                self._next.setdefault(request.previous, []).append(index)

    async def play(self, limit_s: float) -> list[Record]:
        """All requests; what has not ended after `limit_s` is cancelled and marked UNFINISHED."""
        self._start = self.clock.now()
        first = [i for i, r in enumerate(self.workload.requests) if r.previous is None]
        turns = [
            asyncio.ensure_future(self._session(i, self.workload.requests[i].arrival_s))
            for i in first
        ]
        limit = asyncio.ensure_future(self.clock.sleep_until(self._start + limit_s))
        everything = asyncio.ensure_future(asyncio.wait(turns))
        waited: list[asyncio.Future[Any]] = [everything, limit]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for task in [*turns, *waited]:
            task.cancel()
        await asyncio.gather(*turns, *waited, return_exceptions=True)
        for task in turns:
            if not task.cancelled():
                task.result()  # an exception of the player itself is no measurement
        self.records.sort(key=lambda record: record.index)
        return self.records

    async def _session(self, index: int, due_s: float) -> None:
        """A turn, then those that follow it."""
        await self.clock.sleep_until(self._start + due_s)
        record = await self._turn(index, due_s)
        following = self._next.get(index, ())
        if record.error:
            return  # there is no answer that a next turn could contain
        for turn in following:
            await self._session(turn, record.end_s + self.workload.requests[turn].think_s)

    async def _turn(self, index: int, due_s: float) -> Record:
        request = self.workload.requests[index]
        adapter = None if self.base_traffic else self.workload.adapters[request.adapter].name
        prompt = self._prompt(request)
        record = Record(
            index, request.adapter, len(prompt), request.output.length, due_s, self._now()
        )
        self.records.append(record)
        answer = Answer()
        try:
            await self.send(prompt, adapter, request.output.length, answer)
        except asyncio.CancelledError:
            answer.error = UNFINISHED
            self._fill(record, answer)
            raise
        self._fill(record, answer)
        self._answers[request.output.key] = answer.tokens
        self.done(record)
        return record

    def _now(self) -> float:
        return self.clock.now() - self._start

    def _prompt(self, request: Request) -> list[int]:
        """Token ids; earlier answers are those that the server gave."""
        found: list[int] = []
        for segment in request.prompt:
            if segment.generated:
                found += self._answers[segment.key]
                continue
            if segment not in self._cut:
                self._cut[segment] = token_ids(segment, self.vocabulary)
            found += self._cut[segment]
        return found

    def _fill(self, record: Record, answer: Answer) -> None:
        record.end_s = self._now()
        record.error, record.cached = answer.error, answer.cached
        record.waited_s = record.end_s - record.due_s
        if not answer.arrivals:
            return
        first, before = answer.arrivals[0]
        record.ttft_s = first - self._start - record.due_s
        record.end_s = answer.arrivals[-1][0] - self._start
        last = first
        for when, tokens in answer.arrivals[1:]:
            record.gaps_s += [(when - last) / (tokens - before)] * (tokens - before)
            last, before = when, tokens
        record.tokens = before


def token_ids(segment: Segment, vocabulary: int) -> list[int]:
    """The tokens of a segment, folded into a vocabulary that is smaller than the workload's.

    ValueError when the vocabulary leaves hardly any token.
    """
    if vocabulary <= 2 * FIRST_TOKEN - 1:
        raise ValueError(
            f"--model: wanted a vocabulary of {2 * FIRST_TOKEN} or more, got {vocabulary}"
        )
    tokens = segment.tokens().tolist()
    if vocabulary < SMALLEST_VOCABULARY:
        span = vocabulary - FIRST_TOKEN
        return [FIRST_TOKEN + (token - FIRST_TOKEN) % span for token in tokens]
    return tokens
