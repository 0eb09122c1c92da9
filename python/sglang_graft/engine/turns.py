"""First come, first served, also for slots: no stream of one adapter keeps another waiting.

Target (0.5.17): `Scheduler._get_new_batch_prefill_raw`; `admission` calls `in_turn`. Reason: with
more adapters wanted than `--max-loras-per-batch`, SGLang passes over a request whose adapter has no
slot and admits later ones, so that one adapter's steady traffic can starve another.

Policy: within one pass, a request behind one that waits for a slot waits too. Running requests end
and give their slots back, so the wait of the first in line is bounded by theirs. The order is the
waiting queue's, which `--schedule-policy` and priorities decide.
"""

from collections.abc import Callable
from typing import Any

from sglang_graft.engine.hooks import Hook


def begin_pass(self: Any, prefill_delayer_single_pass: Any, running_batch: Any) -> None:
    """BEFORE `_get_new_batch_prefill_raw`: nobody waits for a slot yet."""
    self.tree_cache.waits_for_slot = False


def in_turn(
    original: Callable[..., bool], self: Any, req: Any, running_loras: set[str | None]
) -> bool:
    """SGLang's `_can_schedule_lora_req`, and no for all that follow one that it refused."""
    cache = self.tree_cache
    if not cache.waits_for_slot:
        cache.waits_for_slot = not original(self, req, running_loras)
    return not cache.waits_for_slot


HOOKS = (
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        kind="before",
        function=begin_pass,
        parameters=("self", "prefill_delayer_single_pass", "running_batch"),
        reason="a pass over the waiting queue begins",
    ),
)
