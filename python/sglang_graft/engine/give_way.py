"""Threads that read adapters get Python's lock while the scheduler's loop launches nothing.

No target of its own: `waiting` and `background_load` call it. Reason: a loop that polls its sockets
lets go of the lock thousands of times a second, for microseconds, and has it back before a thread
that waits for it is awake; and a thread forces its turn only once nobody has let go of it for a
whole switch interval. A loop that runs batches waits for the device, without the lock, for most of
each step.

Measured on two CPU cores, one request after the other on a server with adapters of 12 MB in 32
layers that have to come from disk (benchmark/serving/bench_disk.py): 35 to 58 s each without this,
0.2 s with it.
"""

from __future__ import annotations

import time
from typing import Any

TURN_SECONDS = 5e-4
"""How long such a loop stands still, once a turn for each caller that has something read."""


def give_way(scheduler: Any) -> None:
    """Call it once a turn of the loop while something is being read."""
    nothing_runs = scheduler.running_batch.is_empty() and not scheduler.last_batch
    if nothing_runs or scheduler._engine_paused:
        time.sleep(TURN_SECONDS)
