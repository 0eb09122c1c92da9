"""Loading an adapter: a name is taken once, and replaced only when that is asked for.

Target (0.5.17): `TokenizerControlMixin.load_lora_adapter`. Reason: SGLang cannot replace an adapter
in place, and reads a folder before it finds out that the name is taken.

A replacement is one message to the scheduler. It reads the folder first; when that fails, the old
adapter stays as it is. After it has answered, the name leads to the new registration in one step.
Requests that have their id by then finish on the old weights, and the old registration retires as
after an unload.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, LoRAUpdateOutput

from sglang_graft.adapters import AdapterError
from sglang_graft.engine.freed import Freed
from sglang_graft.engine.hooks import Hook
from sglang_graft.serving import aliases, chat_templates, load_paths, names, unload


async def load(
    original: Callable[..., Awaitable[Any]], self: Any, obj: Any, request: Any = None
) -> Any:
    """AROUND `load_lora_adapter`."""
    self.auto_create_handle_loop()

    async def accepted(obj: Any) -> Any:
        # A caller that gives up must not leave a load half done, or its answer to the next one.
        return await asyncio.shield(_load(original, self, obj))

    return await load_paths.checked(accepted, self, obj, request)


async def _load(original: Callable[..., Awaitable[Any]], manager: Any, obj: Any) -> Any:
    name = obj.lora_name
    base = {manager.served_model_name, manager.server_args.model_path}
    plain = LoadLoRAAdapterReqInput(lora_name=name, lora_path=obj.lora_path, pinned=obj.pinned)
    registry = manager.lora_registry
    async with registry.lock_of(name), registry.load_lock:
        if (reason := names.reserved(name, base) or aliases.taken(manager, name)) is not None:
            return LoRAUpdateOutput(success=False, error_message=reason)
        if registry.ref(name) is not None and not getattr(obj, "load_inplace", False):
            return LoRAUpdateOutput(success=False, error_message=already_loaded(name))
        try:
            registry.next_templates[name] = await chat_templates.read_in_thread(obj.lora_path)
            return await _load_or_replace(original, manager, plain)
        except AdapterError as error:
            return LoRAUpdateOutput(success=False, error_message=str(error))
        finally:
            registry.next_templates.pop(name, None)


def already_loaded(name: str) -> str:
    """The message for a name that is taken."""
    return (
        f"adapter {name} is already loaded; unload it first, or load it with"
        ' "load_inplace": true to replace it'
    )


async def _load_or_replace(
    original: Callable[..., Awaitable[Any]], manager: Any, plain: LoadLoRAAdapterReqInput
) -> Any:
    if manager.lora_registry.ref(plain.lora_name) is None:
        result = await original(manager, plain, None)
        return unload.with_freed(manager, Freed(0, 0, 0), 0) if result.success else result
    async with manager.lora_update_lock:
        return await _replace(manager, plain)


async def _replace(manager: Any, obj: LoadLoRAAdapterReqInput) -> Any:
    ref = LoRARef(lora_name=obj.lora_name, lora_path=obj.lora_path, pinned=obj.pinned)
    obj.lora_id = ref.lora_id
    (result,) = await manager.update_lora_adapter_communicator(obj)
    if not result.success:
        return result
    old = manager.lora_registry.swap(ref)
    manager.lora_ref_cache[obj.lora_name] = ref
    assert old is not None, f"{obj.lora_name} had no registration, and its lock was held"
    return await unload.retired(manager, old, Freed.from_text(result.error_message))


HOOKS = (
    Hook(
        target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
        ".load_lora_adapter",
        kind="around",
        function=load,
        parameters=("self", "obj", "_"),
        reason="names are taken once, and adapters replaced in place",
    ),
)
