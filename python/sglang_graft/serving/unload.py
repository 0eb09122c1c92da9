"""Unloading an adapter: its name goes at once, its bytes with its last request.

Target (0.5.17): `TokenizerControlMixin.unload_lora_adapter`. Reason: SGLang waits for the adapter's
requests to end before it answers, for ever while generation is paused, and holds up every later
load and unload meanwhile. It also loads an unloaded adapter again when a request names it.

Here an unload retires the registration: nobody finds its name, and the scheduler frees what no
request holds. Requests that were accepted before finish on the adapter, wherever they are by then:
running, waiting, or not sent yet. When the last of them has ended, the reaper tells the scheduler
to forget the registration.

It waits for loads of its own name only. SGLang has one lock and one line of messages for loads and
unloads; behind a few loads, whose folders are read one after the other, an unload would wait for
all of them. So it goes as an operation of `engine/control`, which every turn of the loop answers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import LoRAUpdateOutput

from sglang_graft.engine.freed import Freed
from sglang_graft.engine.hooks import Hook
from sglang_graft.serving import aliases
from sglang_graft.serving.control import RefusedOperationError, ask
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


def with_freed(manager: Any, freed: Freed, requests: int) -> FreedOutput:
    """A success, and what it freed."""
    loaded = manager.lora_registry.get_all_adapters()
    return FreedOutput(
        success=True,
        error_message="",
        loaded_adapters={name: ref.lora_path for name, ref in loaded.items()},
        freed_pages=freed.pages,
        freed_bytes=freed.pages * freed.page_bytes,
        following_pages=freed.following,
        following_bytes=freed.following * freed.page_bytes,
        requests=requests,
    )


async def retired(manager: Any, ref: LoRARef, freed: Freed) -> FreedOutput:
    """The scheduler has retired `ref`, which `freed`: forget it now, or with its last request."""
    requests = in_flight(manager)[ref.lora_id]
    if requests == 0:
        rest = await _tell(manager, ref)
        freed = Freed(freed.pages + rest.pages, 0, freed.page_bytes)
    else:
        registry = manager.lora_registry
        registry.retired[ref.lora_id] = ref
        if registry.reaper is None or registry.reaper.done():
            registry.reaper = asyncio.ensure_future(_reap(manager))
    return with_freed(manager, freed, requests)


async def unload(
    original: Callable[..., Awaitable[Any]], self: Any, obj: Any, request: Any = None
) -> Any:
    """AROUND `unload_lora_adapter`. Without an HTTP request Graft itself, or a program, asks."""
    self.auto_create_handle_loop()
    # A caller that gives up must not take the scheduler's answer away from the next one.
    return await asyncio.shield(_unload(self, obj.lora_name, by_client=request is not None))


async def _unload(manager: Any, name: str, *, by_client: bool) -> LoRAUpdateOutput:
    registry = manager.lora_registry
    async with registry.lock_of(name):
        if by_client and (reason := aliases.led_to(manager, name)) is not None:
            return LoRAUpdateOutput(success=False, error_message=reason)
        try:
            ref = registry.take(name)
        except ValueError as error:
            return LoRAUpdateOutput(success=False, error_message=str(error))
        manager.lora_ref_cache.pop(name, None)
        return await retired(manager, ref, await _tell(manager, ref))


async def _tell(manager: Any, ref: LoRARef) -> Freed:
    """What that frees; the first time for an adapter retires it, the second forgets it."""
    try:
        reply = await ask(manager, "unload_adapter", id=ref.lora_id, name=ref.lora_name)
    except RefusedOperationError as error:
        raise AssertionError(f"the scheduler does not know {ref}: {error}") from None
    return Freed.from_text(reply["freed"])


async def _reap(manager: Any) -> None:
    """Forget every retired registration when its last request has ended."""
    retired = manager.lora_registry.retired
    while retired:
        await asyncio.sleep(POLL_SECONDS)
        used = in_flight(manager)
        for adapter_id in [i for i in retired if not used[i]]:
            freed = await _tell(manager, retired[adapter_id])
            ref = retired.pop(adapter_id)
            logger.info("Adapter %s: its last request has ended, %s", ref.lora_name, freed)


HOOKS = (
    Hook(
        target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
        ".unload_lora_adapter",
        kind="around",
        function=unload,
        parameters=("self", "obj", "_"),
        reason="an unload ends, and an unloaded adapter stays unloaded",
    ),
)
