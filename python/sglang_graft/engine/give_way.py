"""Threads that read adapters get Python's lock while the scheduler's loop has nothing to launch.

No target of its own: `waiting` and `background_load` call it. Reason: an idle loop turns thousands
of times a second and never waits, so a thread that wants the lock gets it only by force, after
Python's switch interval (5 ms), each of the thousands of times that a read wants it. A loop that
runs batches waits for the device, without the lock, for most of each step.

Measured on two CPU cores, one request after the other on a server with adapters of 12 MB in 32
layers that have to come from disk (benchmark/serving/bench_disk.py): 35 to 58 s each without this.
"""

from __future__ import annotations

import time
from typing import Any

TURN_SECONDS = 5e-4
"""How long an idle loop stands still, once a turn: the most that it adds to a request's wait."""


def give_way(scheduler: Any) -> None:
    """Call it once a turn of the loop while something is being read."""
    if scheduler.running_batch.is_empty() and not scheduler.last_batch:
        time.sleep(TURN_SECONDS)
