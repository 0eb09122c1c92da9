"""What runs in threads beside SGLang's own start, and where the start waits for it.

Targets (0.5.17):
- AROUND `Scheduler.init_model_worker`, which loads the model, makes the pools and captures graphs;
  the process says only later that it is ready. So adapters named at start are all registered when
  it returns, and no thread is left when it raises.
- BEFORE `ModelRunner.init_cuda_graphs`: from here on no thread may use the device.
- BEFORE `capture_one_shape` of both graph runners: between two captures, what was read meanwhile is
  registered. Later captures (after an update of the weights) find nothing to do.
"""

import sys
from collections.abc import Callable
from typing import Any

from sglang_graft.engine.hooks import Hook
from sglang_graft.engine.start_adapters import StartAdapters

SWITCH_SECONDS = 5e-4
"""How long a thread of the scheduler's process may keep the interpreter's lock from another.

Threads that read adapters run beside captures and beside the scheduler's loop, which takes that
lock back after each launch: it would wait up to Python's 5 ms for one that computes in Python.
"""

_stops: list[Callable[[], None]] = []


def stop_at_end(stop: Callable[[], None]) -> None:
    """Call `stop` when the start has ended, well or not."""
    _stops.append(stop)


def init_model_worker(original: Callable[[Any], None], self: Any) -> None:
    """AROUND `Scheduler.init_model_worker`."""
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        original(self)
        _adapters(self.tp_worker.model_runner).finish()
    finally:
        while _stops:
            _stops.pop()()


def before_graphs(self: Any, capture_decode_cuda_graph: bool = True) -> None:
    """BEFORE `ModelRunner.init_cuda_graphs`."""
    adapters = _adapters(self)
    adapters.register_ready()
    adapters.gate.close()


def between_captures(self: Any, *_: Any, **__: Any) -> None:
    """BEFORE `capture_one_shape`."""
    _adapters(self.model_runner).register_ready()


def _adapters(model_runner: Any) -> StartAdapters:
    found = model_runner.lora_manager.at_start
    assert isinstance(found, StartAdapters), f"adapters named at start: {type(found).__name__}"
    return found


_RUNNERS = "sglang.srt.model_executor.runner"

HOOKS = (
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.init_model_worker",
        kind="around",
        function=init_model_worker,
        parameters=("self",),
        reason="the start waits for what runs beside it, and ends it when it fails",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs",
        kind="before",
        function=before_graphs,
        parameters=("self", "capture_decode_cuda_graph"),
        reason="no other thread uses the device while graphs are captured",
    ),
    Hook(
        target=f"{_RUNNERS}.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_one_shape",
        kind="before",
        function=between_captures,
        parameters=("self", "size", "forward", "stream_idx", "variant_label"),
        reason="adapters named at start are registered as they are read",
    ),
    Hook(
        target=f"{_RUNNERS}.prefill_cuda_graph_runner.PrefillCudaGraphRunner.capture_one_shape",
        kind="before",
        function=between_captures,
        parameters=("self", "size", "prefix_num_chunks"),
        reason="adapters named at start are registered as they are read",
    ),
)
