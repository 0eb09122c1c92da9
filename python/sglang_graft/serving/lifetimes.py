"""Time-to-live: an adapter that nobody used for so long is unloaded.

By the clock of the HTTP process, where every request gets its adapter; the scheduler decides
nothing by it. Unused means: no request is under way, and none came for that long. What is pinned or
has an alias stays, because somebody has said that it is wanted; its time runs all the same.
"""

import asyncio
import logging
from typing import Any

from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

from sglang_graft.serving.adapter_store import on_demand
from sglang_graft.serving.aliases import aliases
from sglang_graft.serving.registry import in_flight

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_graft_lifetimes"
LOOK_SECONDS = 0.5
"""Most time between two looks, and so how much later than its time an adapter goes."""


class Lifetimes:
    """Watches the registry's `time_to_live`, which an unload takes away with the name."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self._task: asyncio.Task[None] | None = None

    def get(self, name: str) -> float | None:
        """The seconds of an adapter; None: it stays until it is unloaded."""
        seconds: float | None = self.manager.lora_registry.time_to_live.get(name)
        return seconds

    def set(self, name: str, seconds: float | None) -> None:
        """Give an adapter its time, from its last use on; None takes it away."""
        times = self.manager.lora_registry.time_to_live
        times.pop(name, None)
        if seconds is None:
            return
        times[name] = seconds
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
            self._task.add_done_callback(_ended)

    def idle(self, name: str) -> float:
        """Seconds since the last use of a loaded adapter, or since its load."""
        registry = self.manager.lora_registry
        return float(registry.clock() - registry.used[name])

    def due(self) -> list[str]:
        """The names whose time is up, in order."""
        registry, busy = self.manager.lora_registry, in_flight(self.manager)
        found = []
        for name, seconds in sorted(registry.time_to_live.items()):
            ref = registry.ref(name)
            if ref is None:
                continue
            if busy[ref.lora_id]:
                registry.used[name] = registry.clock()  # in use until its requests end
            kept = ref.pinned or aliases(self.manager).of(name)
            if not kept and self.idle(name) >= seconds:
                found.append(name)
        return found

    async def expire(self) -> None:
        """Unload what is due. A folder below the roots keeps its time for when it comes back."""
        times = self.manager.lora_registry.time_to_live
        for name in self.due():
            seconds = times[name]
            logger.info("Adapter %s is unloaded: unused for %.1f s", name, self.idle(name))
            await self.manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))
            if self.manager.lora_registry.ref(name) is None and on_demand(self.manager).candidate(
                name
            ):
                times[name] = seconds

    async def _watch(self) -> None:
        times = self.manager.lora_registry.time_to_live
        while times:
            await asyncio.sleep(min(LOOK_SECONDS, *times.values()))
            await self.expire()


def _ended(watcher: "asyncio.Task[None]") -> None:
    if not watcher.cancelled() and watcher.exception() is not None:
        logger.error("Times to live are no longer watched", exc_info=watcher.exception())


def lifetimes(manager: Any) -> Lifetimes:
    """Those of this server; the same object for every call."""
    made: Lifetimes | None = getattr(manager, _ATTRIBUTE, None)
    if made is None:
        made = Lifetimes(manager)
        setattr(manager, _ATTRIBUTE, made)
    return made
