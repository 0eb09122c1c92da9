"""When requests are admitted and end, the same for every policy.

Time model: one device. First come, first served; prefills run one after the other; a request then
decodes beside the others at a fixed time a token. A request is admitted when the device is free to
prefill it and its pages (weights, prompt, output; shared ones once) fit beside those of running
requests. Service takes what a warm cache would need: pages that an earlier request computed cost
nothing here. So admissions do not depend on the policy, and every policy, and the optimum, answers
the very same sequence. What a policy's misses cost comes on top, see `replay`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from sglang_graft.cache.rates import Rates
from sglang_graft.sim.trace import Demand, Trace

Known = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """The modelled device: its pages, prices and decode speed."""

    pages: int
    rates: Rates = field(default_factory=Rates)
    decode_s_per_token: float = 0.012
    max_running: int = 256
    chunk_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class Event:
    """A request is admitted, or ends, at `at_s` with a warm cache."""

    request: int
    admitted: bool
    at_s: float


@dataclass(slots=True)
class Schedule:
    """events: in order.   ready_s: when each request came.   first_s: when its first token came,
    with a warm cache.   held: pages that running requests hold just after each admission, in order
    of admission."""

    events: list[Event] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    held: list[int] = field(default_factory=list)


class Held:
    """Pages that running requests hold, shared ones once."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._blocks = np.zeros(trace.blocks, dtype=np.int64)
        self._adapters = [0] * len(trace.workload.adapters)
        self.pages = 0

    def extra(self, demand: Demand) -> int:
        """Pages that admitting this one would add."""
        shared = int(np.count_nonzero(self._blocks[demand.blocks]))
        weights = 0 if self._adapters[demand.adapter] else self._weights(demand)
        return demand.pages - shared + weights

    def add(self, demand: Demand) -> None:
        """It is admitted."""
        self.pages += self.extra(demand)
        self._adapters[demand.adapter] += 1
        self._blocks[demand.blocks] += 1

    def remove(self, demand: Demand) -> None:
        """It ended."""
        self._adapters[demand.adapter] -= 1
        self._blocks[demand.blocks] -= 1
        self.pages -= self.extra(demand)

    def _weights(self, demand: Demand) -> int:
        return self._trace.weight_pages(demand.adapter)


class Clock:
    """Requests that wait, in order of their coming, and those that run, in order of their end.

    waiting: (when it comes, request).   running: (when it ends, request).   next_turns: those that
    come after the end of a request, by its index.
    """

    def __init__(self, trace: Trace) -> None:
        requests = trace.workload.requests
        self.waiting = [(r.arrival_s, i) for i, r in enumerate(requests) if r.previous is None]
        heapq.heapify(self.waiting)
        self.running: list[tuple[float, int]] = []
        self.next_turns: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            if request.previous is not None:
                self.next_turns.setdefault(request.previous, []).append(index)

    def follow(self, trace: Trace, index: int, end: float) -> None:
        """The request ended: its next turns come when their users have thought."""
        for turn in self.next_turns.get(index, ()):
            heapq.heappush(self.waiting, (end + trace.workload.requests[turn].think_s, turn))


def schedule(trace: Trace, server: Server) -> Schedule:
    """Admissions and ends in order.

    ValueError when a request alone is larger than the device.
    """
    clock, held, found = Clock(trace), Held(trace), Schedule()
    found.ready_s = [0.0] * len(trace.demands)
    found.first_s = [0.0] * len(trace.demands)
    known = np.zeros(trace.blocks, dtype=np.bool_)
    free_at = 0.0
    while clock.waiting or clock.running:
        if not clock.waiting:
            _end_one(trace, clock, held, found)  # a next turn may follow
            continue
        ready, index = clock.waiting[0]
        now = max(ready, free_at)
        demand = trace.demands[index]
        ended = bool(clock.running) and clock.running[0][0] <= now
        room = not ended and len(clock.running) < server.max_running
        if room and held.pages + held.extra(demand) <= server.pages:
            heapq.heappop(clock.waiting)
            held.add(demand)
            found.ready_s[index] = ready
            found.events.append(Event(index, True, now))
            found.held.append(held.pages)
            free_at = now + _warm_prefill(demand, known, server.rates, trace.sizes.page_tokens)
            found.first_s[index] = free_at
            output = demand.total - demand.prompt
            heapq.heappush(clock.running, (free_at + output * server.decode_s_per_token, index))
        elif clock.running:
            free_at = max(free_at, _end_one(trace, clock, held, found))
        else:
            raise too_large(index, held.extra(demand), server)
    assert held.pages == 0, f"{held.pages} pages are held after the last request"
    return found


def _end_one(trace: Trace, clock: Clock, held: Held, found: Schedule) -> float:
    """End the next running request; returns when."""
    end, index = heapq.heappop(clock.running)
    held.remove(trace.demands[index])
    found.events.append(Event(index, False, end))
    clock.follow(trace, index, end)
    return end


def too_large(index: int, pages: int, server: Server) -> ValueError:
    """A request that fits in no order, with its adapter's `pages`."""
    return ValueError(
        f"request {index} needs {pages} pages with its adapter; the budget is "
        f"{server.pages} pages: raise --budget-gb"
    )


def check_room(trace: Trace, server: Server) -> None:
    """ValueError when a request alone is larger than the device."""
    empty = Held(trace)
    for index, demand in enumerate(trace.demands):
        if empty.extra(demand) > server.pages:
            raise too_large(index, empty.extra(demand), server)


def _warm_prefill(demand: Demand, known: Known, rates: Rates, page_tokens: int) -> float:
    """Seconds for the part of the prompt that nobody computed before; marks all of it known."""
    front = known[demand.blocks[: demand.usable // page_tokens]]
    cached = page_tokens * (len(front) if front.all() else int(front.argmin()))
    known[demand.blocks] = True
    return rates.prefill_seconds(demand.prompt - cached, cached)
