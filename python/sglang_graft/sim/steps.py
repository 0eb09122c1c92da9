"""One GPU that does one forward at a time: when requests get their first tokens and when they end.

The order is that of SGLang's scheduler. A forward is a prefill or a decode step. Prefill goes
first: the prompts that are admitted and whose bytes have landed, in order of landing, up to
`chunk_tokens` tokens in all; what is left of them goes with the next forward. Decode stands still
meanwhile. Otherwise a decode step takes all running requests one token further. Whoever comes waits
for the rest of the forward under way, and is admitted when its pages fit beside those of the
admitted: first come, first served.

What a request finds in the caches and what has to be moved for it is the replay's answer at the
moment of its admission, so that requests that hold their pages longer are in others' way there too.

Decode steps between two events are equal, and are taken at once.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from sglang_graft.sim.replay import Replay
from sglang_graft.sim.schedule import Clock, Held


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
    tokens were cached; and what the GPU did."""

    ready_s: list[float]
    first_s: list[float]
    end_s: list[float]
    cached: list[int]
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

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


@dataclass(slots=True)
class _Gpu:
    """clock.running: (the step after which it ends, request).   landing: (when, request, cached
    tokens) of the admitted whose bytes are under way."""

    run: Replay
    steps: Steps
    served: Served = field(init=False)
    now: float = 0.0
    clock: Clock = field(init=False)
    held: Held = field(init=False)
    landing: list[tuple[float, int, int]] = field(default_factory=list)
    landed_at: dict[int, float] = field(default_factory=dict)  # by adapter
    prompts: list[_Prompt] = field(default_factory=list)
    steps_done: int = 0
    kv_pages: int = 0  # that a decode step reads

    def __post_init__(self) -> None:
        trace = self.run.trace
        count = len(trace.demands)
        self.served = Served([0.0] * count, [0.0] * count, [0.0] * count, [0] * count)
        self.clock, self.held = Clock(trace), Held(trace)

    def step(self) -> bool:
        """One forward, or several equal ones, or a pause until there is something to do; False
        when there is nothing left."""
        while self.clock.running and self.clock.running[0][0] <= self.steps_done:
            _, request = heapq.heappop(self.clock.running)
            self.kv_pages -= self.run.trace.demands[request].pages
            self._end(request)
        event = self._admit()
        while self.landing and self.landing[0][0] <= self.now:
            _, request, known = heapq.heappop(self.landing)
            self.prompts.append(_Prompt(request, known))
        if self.landing:
            event = min(event, self.landing[0][0])
        if self.prompts:
            self._prefill()
        elif self.clock.running:
            self._decode(event)
        elif event < math.inf:
            self.now = event
        else:
            assert self.held.pages == 0, f"{self.held.pages} pages are held after the last request"
            return False
        return True

    def _admit(self) -> float:
        """Whoever has come and has room; returns when the next one comes, infinity when nobody does
        or the first one that waits has no room."""
        waiting, run, served = self.clock.waiting, self.run, self.served
        while waiting:
            ready, request = waiting[0]
            if ready > self.now:
                return ready
            demand, inside = run.trace.demands[request], self._inside()
            extra = self.held.extra(demand)
            if inside == run.server.max_running or self.held.pages + extra > run.server.pages:
                assert inside, f"request {request} alone needs {extra} of {run.server.pages} pages"
                return math.inf
            heapq.heappop(waiting)
            self.held.add(demand)
            service = run.admit(request)
            landed = run.landed(ready if run.prefetch else self.now, service)
            # What an earlier request brings may be part of what this one found.
            landed = max(landed, self.landed_at.get(demand.adapter, 0.0))
            self.landed_at[demand.adapter] = landed
            heapq.heappush(self.landing, (landed, request, service.known))
            served.ready_s[request], served.cached[request] = ready, service.known
        return math.inf

    def _inside(self) -> int:
        """Requests that are admitted and have not ended."""
        return len(self.clock.running) + len(self.prompts) + len(self.landing)

    def _prefill(self) -> None:
        demands, server = self.run.trace.demands, self.run.server
        took, room, complete = self.steps.prefill_s, server.chunk_tokens, 0
        for prompt in self.prompts:
            tokens = min(demands[prompt.request].prompt - prompt.done, room)
            took += server.rates.prefill_seconds(tokens, prompt.done)
            prompt.done += tokens
            room -= tokens
            complete += prompt.done == demands[prompt.request].prompt
            if not room:
                break
        self.now += took
        self.served.prefill_s += took
        self.served.prefill_tokens += server.chunk_tokens - room
        ready, self.prompts = self.prompts[:complete], self.prompts[complete:]
        for prompt in ready:
            self._first_token(prompt.request)

    def _first_token(self, request: int) -> None:
        """A prefill makes the first token; the others are decoded."""
        demand = self.run.trace.demands[request]
        self.served.first_s[request] = self.now
        more = demand.total - demand.prompt - 1
        if more > 0:
            self.kv_pages += demand.pages
            heapq.heappush(self.clock.running, (self.steps_done + more, request))
        else:
            self._end(request)

    def _decode(self, event: float) -> None:
        """Steps until somebody ends, or the first one that is over at `event`."""
        batch = len(self.clock.running)
        seconds = self.steps.decode_seconds(batch, self.kv_pages * self.run.trace.sizes.page_bytes)
        count = int(self.clock.running[0][0]) - self.steps_done
        if event < math.inf:
            count = min(count, max(1, math.ceil((event - self.now) / seconds)))
        self.now += count * seconds
        self.steps_done += count
        self.served.decode_s += count * seconds
        self.served.decode_tokens += count * batch

    def _end(self, request: int) -> None:
        self.held.remove(self.run.trace.demands[request])
        self.run.end(request)
        self.served.end_s[request] = self.now
        self.clock.follow(self.run.trace, request, self.now)
