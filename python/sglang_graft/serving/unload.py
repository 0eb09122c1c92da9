"""Unloading an adapter: its requests end first, and afterwards nobody finds its name.

Target (0.5.17): `TokenizerControlMixin._unload_lora_adapter_locked`. Reasons: SGLang silently loads
an unloaded adapter again when a request names it. And its count of an adapter's requests drifts: a
client that leaves in the middle of an answer stays counted, a request with n > 1 is subtracted once
too often. Either way an unload would wait for ever, and every later load or unload behind it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from sglang_graft.engine.hooks import Hook

POLL_SECONDS = 0.05


def in_use(manager: Any, adapter_id: str) -> bool:
    """Whether a request that is under way has this adapter."""
    return any(state.obj.lora_id == adapter_id for state in manager.rid_to_state.values())


async def unload(original: Callable[..., Awaitable[Any]], self: Any, obj: Any) -> Any:
    """AROUND `_unload_lora_adapter_locked`, which sets `obj.lora_id` and waits for a count of 0."""
    self.lora_ref_cache.pop(obj.lora_name, None)
    work = asyncio.ensure_future(original(self, obj))
    try:
        while not work.done():
            await asyncio.wait([work], timeout=POLL_SECONDS)
            count = self.lora_registry._counters.get(obj.lora_id)
            if count is not None and not in_use(self, obj.lora_id):
                await count.decrement(count.value())
    finally:
        work.cancel()
    return work.result()


HOOKS = (
    Hook(
        target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
        "._unload_lora_adapter_locked",
        kind="around",
        function=unload,
        parameters=("self", "obj"),
        reason="an unload ends, and an unloaded adapter stays unloaded",
    ),
)
