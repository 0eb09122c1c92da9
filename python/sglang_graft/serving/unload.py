"""Unloading an adapter: its name goes at once, its bytes with its last request.

Target (0.5.17): `TokenizerControlMixin._unload_lora_adapter_locked`. Reason: SGLang waits for the
adapter's requests to end before it answers, for ever while generation is paused, and holds up every
later load and unload meanwhile. It also loads an unloaded adapter again when a request names it.

Here an unload retires the registration: nobody finds its name, and the scheduler frees what no
request holds. Requests that were accepted before finish on the adapter, wherever they are by then:
running, waiting, or not sent yet. When the last of them has ended, the reaper tells the scheduler
to forget the registration.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import LoRAUpdateOutput, UnloadLoRAAdapterReqInput

from sglang_graft.engine.freed import Freed
from sglang_graft.engine.hooks import Hook
from sglang_graft.serving.registry import in_flight

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05


class FreedOutput(LoRAUpdateOutput):
    """SGLang's answer with what an adapter that lost its name gives back."""

    freed_pages: int = 0
    freed_bytes: int = 0
    following_pages: int = 0
    """Pages that are freed when the adapter's last request has ended."""
    following_bytes: int = 0
    requests: int = 0
    """Requests of the adapter that are under way."""


def with_freed(result: Any, freed: Freed, requests: int) -> FreedOutput:
    """A success, and what it freed."""
    return FreedOutput(
        success=True,
        error_message="",
        loaded_adapters=result.loaded_adapters,
        freed_pages=freed.pages,
        freed_bytes=freed.pages * freed.page_bytes,
        following_pages=freed.following,
        following_bytes=freed.following * freed.page_bytes,
        requests=requests,
    )


async def retired(manager: Any, ref: LoRARef, result: Any) -> FreedOutput:
    """The scheduler has retired `ref` with `result`: forget it now, or with its last request."""
    freed, requests = Freed.from_text(result.error_message), in_flight(manager)[ref.lora_id]
    if requests == 0:
        rest = await _forget(manager, ref)
        freed = Freed(freed.pages + rest.pages, 0, freed.page_bytes)
    else:
        registry = manager.lora_registry
        registry.retired[ref.lora_id] = ref
        if registry.reaper is None or registry.reaper.done():
            registry.reaper = asyncio.ensure_future(_reap(manager))
    return with_freed(result, freed, requests)


async def unload(original: Callable[..., Awaitable[Any]], self: Any, obj: Any) -> Any:
    """AROUND `_unload_lora_adapter_locked`. ValueError, as from SGLang, for a name not loaded."""
    ref = self.lora_registry.take(obj.lora_name)
    self.lora_ref_cache.pop(obj.lora_name, None)
    # A caller that gives up must not take the scheduler's answer away from the next one.
    return await asyncio.shield(_unload(self, ref))


async def _unload(manager: Any, ref: LoRARef) -> FreedOutput:
    return await retired(manager, ref, await send_unload(manager, ref))


async def _forget(manager: Any, ref: LoRARef) -> Freed:
    result = await send_unload(manager, ref)
    return Freed.from_text(result.error_message)


async def send_unload(manager: Any, ref: LoRARef) -> Any:
    """The scheduler's answer; the first call for an adapter retires it, the second forgets it."""
    request = UnloadLoRAAdapterReqInput(lora_name=ref.lora_name, lora_id=ref.lora_id)
    (result,) = await manager.update_lora_adapter_communicator(request)
    assert result.success, f"the scheduler does not know {ref}: {result.error_message}"
    return result


async def _reap(manager: Any) -> None:
    """Forget every retired registration when its last request has ended."""
    retired = manager.lora_registry.retired
    while retired:
        await asyncio.sleep(POLL_SECONDS)
        used = in_flight(manager)
        for adapter_id in [i for i in retired if not used[i]]:
            freed = await _forget(manager, retired[adapter_id])
            ref = retired.pop(adapter_id)
            logger.info("Adapter %s: its last request has ended, %s", ref.lora_name, freed)


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
