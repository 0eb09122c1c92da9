"""First tokens go out before the step behind them is made, where nobody else waits for it.

Target (0.5.17): `Scheduler.get_next_batch_to_run`, the only place that makes batches. Reason: the
overlap schedule makes and launches the next batch before it looks at the last result, so that the
device does not idle meanwhile. A short prefill is launched in about the time that the device takes
for it: then its result is there already, the device idles in either order, and making and
launching a decode step, 2 ms on an H200, only keeps the first token waiting. A request that ends
with its first token needs no such step at all.

This is the order of SGLang's loop without overlap, for one result: processed, then the next batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang_graft.engine.hooks import Hook

PATIENCE_SECONDS = 3e-4
"""How long a result is looked for: the last kernels of a prefill run when it has been launched.

What is lost where it does not come is a part of this, once a prefill on an otherwise idle server.
"""


def first(original: Callable[..., Any], self: Any, running_batch: Any, last_batch: Any) -> Any:
    """AROUND `get_next_batch_to_run`."""
    if not (_is_alone(self, running_batch, last_batch) and _comes(self.result_queue[0][1])):
        return original(self, running_batch, last_batch)
    self.process_batch_result(*self.result_queue.popleft())
    plan = original(self, running_batch, last_batch)
    self.last_batch = None  # so the loop does not look for its result again
    return plan


def _is_alone(self: Any, running_batch: Any, last_batch: Any) -> bool:
    """Whether a prefill has been launched, as a whole, and nothing else runs."""
    return bool(
        self.enable_overlap
        and last_batch
        and last_batch.forward_mode.is_extend()
        and running_batch.is_empty()
        and self.chunked_req is None
        and len(self.result_queue) == 1
    )


def _comes(result: Any) -> bool:
    """Whether the host has the tokens, now or in a moment."""
    if result.copy_done is None:
        return True
    until = time.perf_counter() + PATIENCE_SECONDS
    while not (there := result.copy_done.query()) and time.perf_counter() < until:
        pass
    return bool(there)


HOOKS = (
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
        kind="around",
        function=first,
        parameters=("self", "running_batch", "last_batch"),
        reason="a first token does not wait for the step behind it",
    ),
)
