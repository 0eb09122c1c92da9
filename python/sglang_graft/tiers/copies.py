"""Who copies pages between arena and host pool: streams on a GPU, plain copies on the CPU.

Three queues run side by side: the forward, loads (host to device) and write-backs (device to host).
Each keeps its own order. `Copier` is all that `Transfers` knows of them, so that tests put a clock
of their own in their place.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from sglang_graft.pool import Arena
from sglang_graft.tiers.host_pool import HostPool

Pairs = Sequence[tuple[int, int]]
"""(host page, device page) of each copy."""


class Way(enum.Enum):
    """The two directions of a copy."""

    LOAD = "load"  # host to device
    STORE = "store"  # device to host


class Ticket(Protocol):
    """A copy that was started."""

    def done(self) -> bool:
        """Whether its bytes have landed; never waits."""

    def seconds(self) -> float:
        """How long a copy that is done took, without what it waited for."""


class Copier(Protocol):
    """Starts copies and orders them against the forward; never waits for either."""

    def copy(self, way: Way, pairs: Pairs, after: Sequence[Ticket], forwards: int) -> Ticket:
        """Copy after the first `forwards` forwards, earlier copies the same way, and `after`."""

    def begin_forward(self, tickets: Sequence[Ticket]) -> None:
        """A forward is launched next; it, and so all later ones, come after `tickets`."""


def runs(pairs: Pairs) -> list[tuple[int, int, int]]:
    """Neighbouring pages as (first host page, first device page, count): one copy each."""
    found: list[tuple[int, int, int]] = []
    for host, device in pairs:
        if found:
            first_host, first_device, count = found[-1]
            if (host, device) == (first_host + count, first_device + count):
                found[-1] = (first_host, first_device, count + 1)
                continue
        found.append((host, device, 1))
    return found


class _PageCopier:
    """What both copiers do for one run of pages."""

    def __init__(self, arena: Arena, host: HostPool) -> None:
        size = arena.layout.page_bytes
        assert host.page_bytes == size, f"pages of {host.page_bytes} and of {size} bytes"
        self._device = arena.buffer.view(-1, size)
        self._host = host.buffer

    def _copy(self, way: Way, pairs: Pairs) -> None:
        for host_page, device_page, count in runs(pairs):
            assert device_page > 0, "page 0 is the sink and takes part in no copy"
            host = self._host[host_page - 1 : host_page - 1 + count]
            device = self._device[device_page : device_page + count]
            target, source = (device, host) if way is Way.LOAD else (host, device)
            target.copy_(source, non_blocking=True)


class _Landed:
    """The ticket of a copy that is over when the call returns."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def done(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._seconds


class CpuCopier(_PageCopier):
    """Copies at once. Forwards on the CPU are over when their launch returns."""

    def copy(self, way: Way, pairs: Pairs, after: Sequence[Ticket], forwards: int) -> Ticket:
        start = time.perf_counter()
        self._copy(way, pairs)
        return _Landed(time.perf_counter() - start)

    def begin_forward(self, tickets: Sequence[Ticket]) -> None:
        assert all(ticket.done() for ticket in tickets), "a plain copy is still under way"


class CudaTicket:
    """Events before and behind the copies of one call."""

    def __init__(self, start: Any, event: Any) -> None:
        self._start = start
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def seconds(self) -> float:
        return float(self._start.elapsed_time(self.event)) / 1e3


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaCopier(_PageCopier):
    """Two streams beside the forward's. Both memories outlive every copy, so no tensor is kept.

    Before each forward an event marks the end of those before it, so that a copy can wait for the
    first few forwards alone.
    """

    def __init__(self, arena: Arena, host: HostPool, forward: Callable[[], Any]) -> None:
        """`forward` tells the stream on which forwards are launched."""
        super().__init__(arena, host)
        self._forward = forward
        device = arena.buffer.device
        self._streams = {way: _stream(device) for way in Way}
        for stream in self._streams.values():
            # No forward is behind what made the arena.
            stream.wait_stream(torch.cuda.current_stream(device))
        self._begun = 0
        self._ends: deque[tuple[int, Any]] = deque()
        """(n, event): the event is behind the first n forwards. Rising, of forwards not over."""
        self._over = 0

    def copy(self, way: Way, pairs: Pairs, after: Sequence[Ticket], forwards: int) -> Ticket:
        stream = self._streams[way]
        self._wait_for_forwards(stream, forwards)
        for ticket in after:
            assert isinstance(ticket, CudaTicket), f"a foreign ticket: {type(ticket).__name__}"
            stream.wait_event(ticket.event)
        start, event = _timed_event(), _timed_event()
        start.record(stream)
        with torch.cuda.stream(stream):
            self._copy(way, pairs)
        event.record(stream)
        return CudaTicket(start, event)

    def begin_forward(self, tickets: Sequence[Ticket]) -> None:
        forward = self._forward()
        if not torch.cuda.is_current_stream_capturing():  # such an event would be the graph's own
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(forward)
            self._ends.append((self._begun, event))
            self._forget_ended()  # here too: where nothing is ever copied, marks would pile up
        self._begun += 1
        for ticket in tickets:
            assert isinstance(ticket, CudaTicket), f"a foreign ticket: {type(ticket).__name__}"
            forward.wait_event(ticket.event)

    def _forget_ended(self) -> None:
        """Drop the marks of forwards that are over."""
        while self._ends and self._ends[0][1].query():
            self._over, _ = self._ends.popleft()

    def _wait_for_forwards(self, stream: torch.cuda.Stream, count: int) -> None:
        """Put what `stream` gets next behind the first `count` forwards."""
        self._forget_ended()
        if count <= self._over:
            return
        event = next((event for ended, event in self._ends if ended >= count), None)
        if event is not None:
            stream.wait_event(event)
        else:
            stream.wait_stream(self._forward())
