"""Which adapters have names, and which requests still use one.

Target (0.5.17): class `lora.lora_registry.LoRARegistry`. Reason: SGLang counts an adapter's
requests up at their admission and down at their end, and the two do not meet:

- a request with n > 1 is counted once (or n times, for a list of names) and subtracted n + 1 times;
- a client that leaves, a request that fails validation after its adapter was looked up, and one
  that is aborted in the waiting queue are never subtracted;
- a request that the scheduler ends with 500 or 503 is subtracted twice.

An unload waits for the count to be 0 exactly, so after any of these it waits for ever, and all
later loads and unloads behind it. Here nothing is counted: `TokenizerManager.rid_to_state` holds
every request from its arrival to its end, whatever that end is, and `in_flight` looks there.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry

from sglang_graft.engine.hooks import Hook
from sglang_graft.serving import tenants


class GraftRegistry(LoRARegistry):
    """Names and the registrations that they lead to. Changes only between two awaits."""

    def __init__(self, lora_paths: list[LoRARef] | None = None) -> None:
        # Chat templates of adapters that have their own: by id, and by name while one is loaded, so
        # that a name never leads to an adapter without its template.
        self.templates: dict[str, Any] = {}
        self.next_templates: dict[str, Any] = {}
        # When a name was last used, or loaded, by this process' clock.
        self.clock: Callable[[], float] = time.monotonic
        self.used: dict[str, float] = {}
        # Seconds for which a name may be unused, see `serving/lifetimes`.
        self.time_to_live: dict[str, float] = {}
        super().__init__(lora_paths)
        # One load after the other, as SGLang has it. Aliases change between two loads.
        self.load_lock = asyncio.Lock()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # Registrations without a name, by id, whose last request has not ended.
        self.retired: dict[str, LoRARef] = {}
        self.reaper: asyncio.Task[None] | None = None

    async def acquire(self, lora_name: str | list[str | None]) -> Any:
        """The id of a name, or those of a list. Never suspends: the caller's request has its id
        before anything else can run, so no unload can come in between."""
        if isinstance(lora_name, str):
            return self._id_of(lora_name)
        return [None if name is None else self._id_of(name) for name in lora_name]

    async def release(self, lora_id: str | list[str | None]) -> None:
        """Nothing: a request's state is its count."""

    async def wait_for_unload(self, lora_id: str) -> None:
        """Not offered: an unload does not wait, see `serving/unload`."""
        raise NotImplementedError("Graft unloads without waiting; wanted serving.unload")

    def lock_of(self, lora_name: str) -> asyncio.Lock:
        """Held while a name is loaded, replaced or unloaded; taken before every other lock."""
        return self._locks.setdefault(lora_name, asyncio.Lock())

    def ref(self, lora_name: str) -> LoRARef | None:
        """The registration that a name leads to."""
        return self._registry.get(lora_name)

    def take(self, lora_name: str) -> LoRARef:
        """Remove a name. ValueError when it leads nowhere."""
        if lora_name not in self._registry:
            raise ValueError(
                f"adapter {lora_name} is not loaded. Loaded adapters:"
                f" {', '.join(sorted(self._registry)) or 'none'}"
            )
        ref = self._registry.pop(lora_name)
        del self._counters[ref.lora_id]
        self.templates.pop(ref.lora_id, None)
        self.used.pop(lora_name, None)
        self.time_to_live.pop(lora_name, None)
        return ref

    def swap(self, ref: LoRARef) -> LoRARef | None:
        """Let a name lead to `ref`; what it led to before. The name keeps its place in the list."""
        old = self._registry.pop(ref.lora_name, None)
        if old is not None:
            del self._counters[old.lora_id]
            self.templates.pop(old.lora_id, None)
        self._register_adapter(ref)
        return old

    def repin(self, lora_name: str, pinned: bool) -> LoRARef:
        """Note on a loaded name that it is pinned, or no longer."""
        ref = msgspec.structs.replace(self._registry[lora_name], pinned=pinned)
        self._registry[lora_name] = ref
        return ref

    def _register_adapter(self, lora_ref: LoRARef) -> Any:
        self.used[str(lora_ref.lora_name)] = self.clock()
        registered = super()._register_adapter(lora_ref)
        templates = self.next_templates.pop(lora_ref.lora_name, None)
        if templates is not None:
            self.templates[lora_ref.lora_id] = templates
        return registered

    def _id_of(self, name: str) -> str:
        ref = self._registry.get(name)
        if ref is None:
            raise ValueError(
                f"adapter {name} was unloaded while this request was on its way. Loaded adapters:"
                f" {', '.join(sorted(tenants.visible(self._registry))) or 'none'}"
            )
        self._registry.move_to_end(name)
        self.used[name] = self.clock()
        return ref.lora_id


def in_flight(manager: Any) -> Counter[str]:
    """Requests under way by adapter id, those of the base model left out.

    A request with n > 1 is one until its samples start, and one for each sample then.
    """
    ids = (state.obj.lora_id for state in manager.rid_to_state.values())
    return Counter(i for i in ids if isinstance(i, str))


HOOKS = (
    Hook(
        target="sglang.srt.lora.lora_registry.LoRARegistry",
        kind="replace",
        function=GraftRegistry,
        parameters=("lora_paths",),
        reason="an adapter's requests are known exactly",
    ),
)
