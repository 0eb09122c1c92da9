"""Adapters are read by a worker thread: no request waits while a folder is read and packed.

Targets (0.5.17):
- `Scheduler.load_lora_adapter`: hands the reading to the thread and answers later;
- `Scheduler.process_input_requests`, which every turn of the scheduler's loop calls, also while
  generation is paused: registers what has been read, and sends the answer.

The thread touches no state of the pool. SGLang's HTTP process sends one load at a time. The turn in
which a load becomes visible depends on the disk; with more than one rank it would have to be
agreed upon, and those are refused at start.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sglang_graft.engine import pinning
from sglang_graft.engine.give_way import give_way
from sglang_graft.engine.hooks import Hook
from sglang_graft.engine.lora_manager import READ_ERRORS, GraftLoRAManager
from sglang_graft.engine.start_adapters import ReadAdapter


@dataclass(slots=True)
class Loads:
    """Loads under way, in the order in which they were asked for."""

    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="graft-load")
    )
    _jobs: deque[tuple[Any, "Future[ReadAdapter]"]] = field(default_factory=deque)

    @property
    def are_under_way(self) -> bool:
        """Whether there are loads that nobody has taken."""
        return bool(self._jobs)

    def start(self, request: Any, read: Callable[[Any], ReadAdapter]) -> None:
        """Begin to read the adapter of one LoadLoRAAdapterReqInput."""
        self._jobs.append((request, self._threads.submit(read, request.to_ref())))

    def done(self) -> list[tuple[Any, "Future[ReadAdapter]"]]:
        """Take the loads that have ended; one that has not holds back those behind it."""
        ended = []
        while self._jobs and self._jobs[0][1].done():
            ended.append(self._jobs.popleft())
        return ended


_loads = Loads()


def _manager(scheduler: Any) -> GraftLoRAManager:
    manager = scheduler.tp_worker.model_runner.lora_manager
    assert isinstance(manager, GraftLoRAManager), f"the LoRA manager is {type(manager).__name__}"
    return manager


def load(original: Callable[..., Any], self: Any, recv_req: Any) -> None:
    """AROUND `Scheduler.load_lora_adapter`: SGLang sends no answer for None."""
    _loads.start(recv_req, _manager(self).read)


def finish(self: Any, recv_reqs: list[Any]) -> None:
    """BEFORE `Scheduler.process_input_requests`."""
    for request, future in _loads.done():
        self.ipc_channels.send_to_tokenizer.send_output(_result(self, request, future), request)
    if _loads.are_under_way:
        give_way(self)


def _result(scheduler: Any, request: Any, future: "Future[ReadAdapter]") -> Any:
    manager, ref = _manager(scheduler), request.to_ref()
    try:
        read = future.result()
        if ref.pinned:
            pinning.check(scheduler, manager.residency, ref, read)
    except READ_ERRORS as error:
        return manager.failed(error)
    return manager.finish_load(ref, read)


HOOKS = (
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.load_lora_adapter",
        kind="around",
        function=load,
        parameters=("self", "recv_req"),
        reason="loading an adapter does not stop running requests",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.process_input_requests",
        kind="before",
        function=finish,
        parameters=("self", "recv_reqs"),
        reason="register adapters that have been read",
    ),
)
