"""One GPU that does one forward at a time: when requests get their first tokens and when they end.

The order is that of SGLang's scheduler. A forward is a prefill or a decode step. Prefill goes
first: the prompts that are admitted and whose bytes have landed, in order of landing, up to
`chunk_tokens` tokens in all; what is left of them goes with the next forward. Decode stands still
meanwhile. Otherwise a decode step takes all running requests one token further. Whoever comes waits
for the rest of the forward under way. Before each forward there is a pass over the queue, with the
server's own prefetch and write-back: the first of it have weights and KV brought, who finds no room
for its weights is passed over, and the others are admitted in their order while they fit.

A request fits when its weights, its prompt and its whole answer have room beside the pages that
others hold and those kept for their answers (`reserve`). Once somebody did not fit, nobody is tried
until a request ends, or the first prompts of an idle server are computed. Answers take their pages
as they grow. When there are none left, the request that has made the fewest tokens is retracted: it
gives back its pages, queues behind all that have come, and computes its prompt and those tokens
again.

What a request finds in the caches is the replay's answer at the moment of its admission, so that
requests that hold their pages longer are in others' way there too. What is moved is on the device
at once as far as the tree is concerned; a request's first forward comes when it has landed.

Decode steps between two events have the same requests, and are taken at once.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from sglang_graft.sim.replay import Replay
from sglang_graft.sim.reserve import MOST_TOKENS, Reserve
from sglang_graft.sim.schedule import Clock, Held
from sglang_graft.sim.trace import Demand

# On an idle server one pass reads an adapter and one loads it; with some to spare.
_PASSES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Seconds of forwards, beside what `Rates` says of prompt tokens.

    prefill_s: of a forward with prompts, whatever they are.   decode_s: of a step of one request.
    decode_s_per_request: for each further one.   read_bytes_per_s: at which a step reads the KV of
    its requests.

    Defaults: an 8B model of Llama-3.1's shape with adapters on an H200, as measured, and the
    bandwidth of its memory in its data sheet.
    """

    prefill_s: float = 0.014
    decode_s: float = 0.0055
    decode_s_per_request: float = 25e-6
    read_bytes_per_s: float = 4.8e12

    def __post_init__(self) -> None:
        for name in ("decode_s", "read_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: wanted more than 0, got {getattr(self, name)}")
        for name in ("prefill_s", "decode_s_per_request"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: wanted 0 or more, got {getattr(self, name)}")

    def decode_seconds(self, batch: int, kv_bytes: float) -> float:
        """Of one step of `batch` requests that read `kv_bytes`."""
        more = (batch - 1) * self.decode_s_per_request
        return self.decode_s + more + kv_bytes / self.read_bytes_per_s


@dataclass(slots=True)
class Served:
    """When each request came, had its first token and its last one, and how many of its prompt's
    tokens were cached; and what the GPU did. A request that was retracted keeps its first token."""

    ready_s: list[float]
    first_s: list[float]
    end_s: list[float]
    cached: list[int]
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    retractions: int = 0

    def ttft_s(self) -> list[float]:
        """Time to the first token, by request."""
        return [first - ready for first, ready in zip(self.first_s, self.ready_s, strict=True)]


def serve(run: Replay, steps: Steps) -> Served:
    """The workload of a replay that has seen nothing yet, each request of which has room alone; the
    replay's totals are filled on the way."""
    gpu = _Gpu(run, steps)
    while gpu.step():
        if run.check:
            run.check_invariants()
    return gpu.served


@dataclass(slots=True)
class _Prompt:
    request: int
    done: int  # tokens that are cached or computed
    tokens: int  # with those of its answer that it had made when it was retracted


@dataclass(slots=True)
class _Gpu:
    """clock.running: (the step after which it ends, request).   landing: (when, request, cached
    tokens) of the admitted whose bytes are under way.   retracted: tokens that each of these had
    made, until it has computed them again.   queue: (when it came, request), by that."""

    run: Replay
    steps: Steps
    served: Served = field(init=False)
    now: float = 0.0
    clock: Clock = field(init=False)
    held: Held = field(init=False)  # prompts and weights of the admitted
    prompt_of: list[Demand] = field(init=False)  # a demand without its answer
    reserve: Reserve = field(default_factory=Reserve)
    is_full: bool = False
    queue: list[tuple[float, int]] = field(default_factory=list)
    landing: list[tuple[float, int, int]] = field(default_factory=list)
    landed_at: dict[int, float] = field(default_factory=dict)  # by adapter
    prompts: list[_Prompt] = field(default_factory=list)
    retracted: dict[int, int] = field(default_factory=dict)
    steps_done: int = 0

    def __post_init__(self) -> None:
        trace = self.run.trace
        count = len(trace.demands)
        self.served = Served([0.0] * count, [0.0] * count, [0.0] * count, [0] * count)
        self.clock, self.held = Clock(trace), Held(trace)
        size = trace.sizes.page_tokens
        self.prompt_of = [
            replace(
                demand,
                total=demand.prompt,
                pages=trace.sizes.pages_for(demand.prompt),
                blocks=demand.blocks[: demand.prompt // size],
            )
            for demand in trace.demands
        ]

    def step(self) -> bool:
        """One forward, or several equal ones, or a pause until there is something to do; False
        when there is nothing left."""
        while self.clock.running and self.clock.running[0][0] <= self.steps_done:
            _, request = heapq.heappop(self.clock.running)
            self._end(request)
        event = self._admit()
        while self.landing and self.landing[0][0] <= self.now:
            _, request, known = heapq.heappop(self.landing)
            tokens = self.prompt_of[request].total + self.retracted.get(request, 0)
            self.prompts.append(_Prompt(request, known, tokens))
        if self.landing:
            event = min(event, self.landing[0][0])
        if self.prompts:
            self._prefill()
        elif self.clock.running:
            # Who was passed over is looked at again after the next step.
            passed_over = self.queue and not self.is_full
            self._decode(self.now if passed_over else event)
        elif event < math.inf:
            self.now = event
            if not self.landing:
                self.reserve.pause()
        else:
            assert self.run.room == self.run.server.pages, "pages are held after the last request"
            return False
        return True

    def _admit(self) -> float:
        """Whoever has come and may start; returns when the next one comes, infinity when nobody."""
        waiting = self.clock.waiting
        while waiting and waiting[0][0] <= self.now:
            insort(self.queue, heapq.heappop(waiting))
        for _ in range(_PASSES):
            if self._pass() or self._inside() or not self.queue:
                return waiting[0][0] if waiting else math.inf
        raise AssertionError(f"none of {len(self.queue)} requests starts on an idle server")

    def _pass(self) -> int:
        """Admit in the order of the queue, until one does not fit; returns how many."""
        run, retracted = self.run, self.retracted
        queue, self.queue = self.queue, []
        run.begin_pass([(request, retracted.get(request, 0)) for _, request in queue], self.now)
        for came, request in queue:
            if self.is_full or not run.may_start(request, retracted.get(request, 0)):
                self.queue.append((came, request))
            elif self._inside() and not self._fits(request):
                self.is_full = True
                self.queue.append((came, request))
            else:
                self._begin(came, request)
        return len(queue) - len(self.queue)

    def _begin(self, came: float, request: int) -> None:
        """It is admitted, and its first forward comes when its bytes have landed."""
        run, served = self.run, self.served
        made = self.retracted.get(request, 0)
        self.held.add(self.prompt_of[request])
        service = run.admit(request, made)
        start = came if run.prefetch else self.now
        landed = run.links.landed(start, service.disk, service.copy)
        # What an earlier request brings may be part of what this one found.
        adapter = run.trace.demands[request].adapter
        landed = max(landed, run.here_at(request, made), self.landed_at.get(adapter, 0.0))
        self.landed_at[adapter] = landed
        heapq.heappush(self.landing, (landed, request, service.known))
        if not made:
            served.ready_s[request], served.cached[request] = came, service.known

    def _fits(self, request: int) -> bool:
        """Beside the admitted, of whom those without a first token may still need all they ask."""
        if self._inside() == self.run.server.max_running:
            return False
        page = self.run.trace.sizes.page_tokens
        begun = [prompt.request for prompt in self.prompts] + [entry[1] for entry in self.landing]
        free = self.run.room * page - self.reserve.tokens(self._left())
        free -= sum(map(self._answer, begun))
        tokens = self.held.extra(self.prompt_of[request]) * page + self.retracted.get(request, 0)
        return tokens + self._answer(request) < free

    def _answer(self, request: int) -> int:
        """Tokens that a request without a first token may still need, and a page for rounding."""
        demand, page = self.run.trace.demands[request], self.run.trace.sizes.page_tokens
        left = demand.total - demand.prompt - self.retracted.get(request, 0)
        return page + min(left, MOST_TOKENS)

    def _left(self) -> Iterator[int]:
        """Tokens that each running request has yet to make."""
        return (int(end) - self.steps_done for end, _ in self.clock.running)

    def _inside(self) -> int:
        """Requests that are admitted and have not ended."""
        return len(self.clock.running) + len(self.prompts) + len(self.landing)

    def _prefill(self) -> None:
        server = self.run.server
        took, room, complete = self.steps.prefill_s, server.chunk_tokens, 0
        for prompt in self.prompts:
            tokens = min(prompt.tokens - prompt.done, room)
            took += server.rates.prefill_seconds(tokens, prompt.done)
            prompt.done += tokens
            room -= tokens
            complete += prompt.done == prompt.tokens
            if not room:
                break
        if not self.clock.running:
            # That somebody did not fit is noted at the running batch, and this one takes its place.
            self.is_full = False
        self.now += took
        self.served.prefill_s += took
        self.served.prefill_tokens += server.chunk_tokens - room
        ready, self.prompts = self.prompts[:complete], self.prompts[complete:]
        for prompt in ready:
            self._first_token(prompt.request)

    def _first_token(self, request: int) -> None:
        """A prefill makes the first token, or the next one of who was retracted; the others are
        decoded."""
        demand, made = self.run.trace.demands[request], self.retracted.pop(request, 0)
        if not made:
            self.served.first_s[request] = self.now
        more = demand.total - demand.prompt - made - 1
        if more > 0:
            heapq.heappush(self.clock.running, (self.steps_done + more, request))
        else:
            self._end(request)

    def _decode(self, event: float) -> None:
        """Steps until somebody ends, memory runs out, or the first one that is over at `event`;
        after a retraction one, behind which others are tried."""
        retracted = self._retract()
        running = self.clock.running
        count = 1 if retracted else int(running[0][0]) - self.steps_done
        if event < math.inf:
            over = bisect_left(range(1, count), event - self.now, key=self._seconds)
            count = min(count, over + 1)
        count = bisect_right(range(1, count + 1), self.run.room, key=self._growth)
        if not count:  # one alone, beside prompts whose bytes are under way
            self.now = event
            return
        seconds = self._seconds(count)
        self.now += seconds
        self.steps_done += count
        if not retracted:
            self.reserve.decode(count)
        for end, request in running:
            self.run.grow(request, self._made(int(end), request))
        self.served.decode_s += seconds
        self.served.decode_tokens += count * len(running)

    def _seconds(self, steps: int) -> float:
        """Of so many decode steps, each of which reads the tokens that exist then."""
        demands, running = self.run.trace.demands, self.clock.running
        tokens = sum(demands[i].total - int(end) + self.steps_done for end, i in running)
        mean = tokens + len(running) * (steps - 1) / 2
        read = mean * self.run.trace.sizes.kv_bytes_per_token
        return steps * self.steps.decode_seconds(len(running), read)

    def _made(self, end: int, request: int) -> int:
        """Tokens of its answer, when it ends after step `end`."""
        demand = self.run.trace.demands[request]
        return demand.total - demand.prompt - (end - self.steps_done)

    def _growth(self, steps: int) -> int:
        """Pages that the running requests take in so many steps."""
        # A page is held for the token that a step makes, one step before SGLang takes it to read
        # that token.
        demands, pages_for = self.run.trace.demands, self.run.trace.sizes.pages_for
        now = ((demands[i].total - int(end) + self.steps_done) for end, i in self.clock.running)
        return sum(pages_for(tokens + steps) - pages_for(tokens) for tokens in now)

    def _retract(self) -> bool:
        """Until the next step has pages: whoever has made least, of these the longest prompt; True
        when it was anybody."""
        clock, demands = self.clock, self.run.trace.demands
        before = len(clock.running)
        made = {request: self._made(int(end), request) for end, request in clock.running}
        while len(clock.running) > 1 and self._growth(1) > self.run.room:
            entry = min(clock.running, key=lambda e: (made[e[1]], -demands[e[1]].prompt))
            clock.running.remove(entry)
            request = entry[1]
            self.retracted[request] = made.pop(request)
            self.held.remove(self.prompt_of[request])
            self.run.retract(request)
            heapq.heappush(clock.waiting, (self.now, request))
        if len(clock.running) == before:
            return False
        heapq.heapify(clock.running)
        self.is_full = False
        self.served.retractions += before - len(clock.running)
        answers = (demands[index].total - demands[index].prompt for index in made)
        self.reserve.retracted(made.values(), answers)
        return True

    def _end(self, request: int) -> None:
        self.is_full = False
        self.held.remove(self.prompt_of[request])
        self.run.end(request)
        self.served.end_s[request] = self.now
        self.clock.follow(self.run.trace, request, self.now)
