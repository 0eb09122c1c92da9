"""What the copier for a GPU puts behind what, on streams and events that a test moves."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from sglang_graft.pool import Arena, PageLayout
from sglang_graft.tiers import CudaCopier, HostPool, Way, copies

LAYOUT = PageLayout(layers=1, page_tokens=16, kv_heads=1, head_dim=8, dtype=torch.float32)


class Stream:
    """`log`: what is on it, in order; of these the first `ended` are over."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.ended = 0

    def wait_event(self, event: "Event") -> None:
        self.log.append(event)

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.log.append(event)


class Event:
    """Behind the first `place` things on `stream`."""

    stream: Stream
    place: int

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.log)
        stream.log.append("mark")

    def query(self) -> bool:
        return self.stream.ended >= self.place


class Machine:
    """A copier whose forwards are over when `end` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(copies, "_stream", lambda device: Stream())
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        self.capturing = False
        self.maker = Stream()
        self.maker.log.append("zeros")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.maker)
        self.forward = Stream()
        arena = Arena(LAYOUT, 4, "cpu")
        host = HostPool(3, LAYOUT.page_bytes, pin=False)
        self.copier = CudaCopier(arena, host, lambda: self.forward)
        self.launched = 0

    def launch(self, *tickets: Any) -> None:
        self.copier.begin_forward(tickets)
        self.launched += 1
        self.forward.log.append(f"forward {self.launched}")

    def end(self, forward: int) -> None:
        self.forward.ended = self.forward.log.index(f"forward {forward}") + 1

    def behind(self, forwards: int, way: Way = Way.LOAD) -> str | None:
        """The last thing on the forward's stream that a copy waits for."""
        stream = self.copier._streams[way]
        before = len(stream.log)
        self.copier.copy(way, [(1, 1)], [], forwards)
        waits = [entry for entry in stream.log[before:] if entry != "mark"]
        assert len(waits) <= 1
        if not waits:
            return None
        before_it = self.forward.log[: waits[0].place]
        return [entry for entry in before_it if isinstance(entry, str) and entry != "mark"][-1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_copies_come_after_what_made_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    for way in Way:
        first = machine.copier._streams[way].log[0]
        assert first.stream is machine.maker
        assert machine.maker.log[: first.place][0] == "zeros"
        assert machine.copier._streams[way].log[1:] == []


def test_a_copy_waits_for_as_many_forwards_as_it_is_told(machine: Machine) -> None:
    assert machine.behind(0) is None
    for _ in range(4):
        machine.launch()
    assert [machine.behind(count) for count in (4, 3, 1, 2, 0)] == [
        "forward 4",
        "forward 3",
        "forward 1",
        "forward 2",
        None,
    ]
    machine.end(2)
    assert [machine.behind(count) for count in (2, 1, 3, 4)] == [
        None,
        None,
        "forward 3",
        "forward 4",
    ]
    assert machine.behind(4, Way.STORE) == "forward 4"


def test_marks_do_not_pile_up_where_nothing_is_copied(machine: Machine) -> None:
    for number in range(1, 50):
        machine.launch()
        machine.end(number)
    assert len(machine.copier._ends) <= 1
    assert machine.behind(48) is None
    assert machine.behind(49) == "forward 49"


def test_a_forward_comes_after_the_tickets_and_its_mark_before(machine: Machine) -> None:
    machine.launch()
    ticket = machine.copier.copy(Way.LOAD, [(1, 1)], [], 0)
    machine.launch(ticket)
    mark, waits, forward = machine.forward.log[-3:]
    assert (mark, waits, forward) == ("mark", ticket.event, "forward 2")
    assert machine.behind(1) == "forward 1", "a copy does not wait for what a forward waits for"


def test_a_copy_comes_after_the_copies_that_it_is_given(machine: Machine) -> None:
    first = machine.copier.copy(Way.STORE, [(1, 1)], [], 0)
    machine.copier.copy(Way.LOAD, [(2, 1)], [first], 0)
    assert machine.copier._streams[Way.LOAD].log[1] is first.event


def test_forwards_of_a_capture_count_and_leave_no_mark(machine: Machine) -> None:
    machine.capturing = True
    machine.launch()
    assert machine.forward.log == ["forward 1"]
    machine.capturing = False
    machine.launch()
    machine.launch()
    assert machine.behind(1) == "forward 1", "the next mark is behind it"
    assert machine.behind(2) == "forward 2"


def test_the_time_of_a_copy_is_without_what_it_waited_for(machine: Machine) -> None:
    machine.launch()
    machine.copier.copy(Way.LOAD, [(1, 1)], [], 1)
    _, wait, start, end = machine.copier._streams[Way.LOAD].log
    assert wait.stream is machine.forward
    assert (start, end) == ("mark", "mark")
