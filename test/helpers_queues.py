"""Queues whose work happens when a test says so: forwards, copies both ways, and a thread pool.

Memory is modelled by tags: a page of KV or of weights holds the name of what was last written to
it. A forward checks, at the moment when it runs, that every page that it reads holds what it
should. So a missing fence, a page given away too early or a wrong copy is seen, whatever the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from sglang_graft.tiers import Way

Tag = tuple[Any, ...]


@dataclass(eq=False)
class Op:
    """Work on one queue, a step at a time, after `after`."""

    after: list[Op]
    steps: deque[Callable[[], None]]

    def done(self) -> bool:
        if self.steps:
            return False
        while self.after and self.after[-1].done():
            self.after.pop()
        return not self.after

    def seconds(self) -> float:
        return 1e-6  # whatever its size, so that prices differ from window to window


class FakeCopier:
    """Three queues; nothing happens until `advance`. Also the memory of device and host."""

    def __init__(self) -> None:
        self.device: dict[int, Tag] = {}
        self.host: dict[int, Tag] = {}
        self.queues: dict[str, deque[Op]] = {"forward": deque(), "load": deque(), "store": deque()}
        self._last_forward: Op | None = None
        self._begun: list[Op] = []

    def copy(
        self, way: Way, pairs: Sequence[tuple[int, int]], after: Sequence[Any], forwards: int
    ) -> Op:
        def one(host: int, device: int) -> Callable[[], None]:
            def step() -> None:
                if way is Way.LOAD:
                    self.device[device] = self.host.get(host, ("never written",))
                else:
                    self.host[host] = self.device.get(device, ("never written",))

            return step

        assert forwards <= len(self._begun), f"behind {forwards} forwards of {len(self._begun)}"
        first = self._begun[forwards - 1 : forwards] if forwards else []
        op = Op([*first, *after], deque(one(h, d) for h, d in pairs))
        self.queues[way.value].append(op)
        return op

    def begin_forward(self, tickets: Sequence[Any]) -> None:
        self._launch(Op(list(tickets), deque()))
        assert self._last_forward is not None
        self._begun.append(self._last_forward)

    def forward(self, reads: dict[int, Tag], writes: dict[int, Tag]) -> None:
        """Launch a forward; a step for each page, reads first."""

        def check(page: int, tag: Tag) -> Callable[[], None]:
            def step() -> None:
                found = self.device.get(page)
                assert found == tag, f"a forward reads page {page}: wanted {tag}, found {found}"

            return step

        def write(page: int, tag: Tag) -> Callable[[], None]:
            return lambda: self.device.update({page: tag})

        steps = [check(*item) for item in reads.items()] + [write(*i) for i in writes.items()]
        self._launch(Op([], deque(steps)))
        self._begun[-1] = self.queues["forward"][-1]

    def advance(self, name: str) -> bool:
        """One step of the first operation of a queue, if it may run; whether there was one."""
        queue = self.queues[name]
        while queue and queue[0].done():
            queue.popleft()
        if not queue or not all(op.done() for op in queue[0].after):
            return False
        queue[0].steps.popleft()()
        return True

    def drain(self) -> None:
        """Run everything that was started."""
        while any(self.advance(name) for name in self.queues):
            pass
        assert not any(op.steps for queue in self.queues.values() for op in queue), "a deadlock"

    def _launch(self, op: Op) -> None:
        if self._last_forward is not None:
            op.after.append(self._last_forward)
        self._last_forward = op
        self.queues["forward"].append(op)


class FakeExecutor(Executor):
    """Runs a job when told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self.jobs.append((future, lambda: fn(*args, **kwargs)))
        return future

    def advance(self, index: int = 0) -> bool:
        """Run one of the open jobs."""
        if not self.jobs:
            return False
        future, work = self.jobs.pop(index % len(self.jobs))
        try:
            result = work()
        except (OSError, ValueError) as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        return True
