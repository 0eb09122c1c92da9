"""First tokens go out before the step behind them is made, where nobody else waits for it.

Target (0.5.17): `Scheduler.get_next_batch_to_run`, the only place that makes batches. Reason: the
overlap schedule makes and launches the next batch before it looks at the last result, so that the
device does not idle meanwhile. But where the result is there already, the device idles in either
order, and the first token only waits, for a decode step to be made and launched. A request that
ends with its first token needs no such step at all.

On the CPU a result is always there. On a GPU it is when the device was done with a prompt as soon
as its last kernel had been launched: when the prompt is short, or the host slow.

This is the order of SGLang's loop without overlap, for one result: processed, then the next batch.
Three things would not bear it:

- penalties: SGLang counts a request's last known token when it makes a step, which the overlap
  schedule does one result early. After a result in time, the first token would count twice.
- tensor parallelism: ranks would have to agree whether a result is there. Graft refuses it.
- mixed batches, whose running requests are in no running batch meanwhile. Graft refuses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_graft.engine.hooks import Hook


def first(original: Callable[..., Any], self: Any, running_batch: Any, last_batch: Any) -> Any:
    """AROUND `get_next_batch_to_run`."""
    if not (_is_alone(self, running_batch, last_batch) and _is_there(self.result_queue[0][1])):
        return original(self, running_batch, last_batch)
    self.process_batch_result(*self.result_queue.popleft())
    plan = original(self, running_batch, last_batch)
    self.last_batch = None  # so the loop does not look for its result again
    # What was published with the result did not know that these requests run now.
    self.running_batch = plan.running_batch
    self.publish_load_snapshot(force=True)
    return plan


def _is_alone(self: Any, running_batch: Any, last_batch: Any) -> bool:
    """Whether a prefill has been launched, as a whole and without penalties, and nothing runs."""
    return bool(
        self.enable_overlap
        and last_batch
        and last_batch.forward_mode.is_extend()
        and running_batch.is_empty()
        and self.chunked_req is None
        and len(self.result_queue) == 1
        and not _counts_tokens(last_batch.sampling_info)
    )


def _counts_tokens(sampling: Any) -> bool:
    """Whether a request of a batch has a penalty; an embedding has no sampling at all."""
    return sampling is not None and bool(sampling.penalizer_orchestrator.is_required)


def _is_there(result: Any) -> bool:
    """Whether the host has the tokens; asks the device, and does not wait for it."""
    return result.copy_done is None or bool(result.copy_done.query())


HOOKS = (
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
        kind="around",
        function=first,
        parameters=("self", "running_batch", "last_batch"),
        reason="a first token does not wait for the step behind it",
    ),
)
