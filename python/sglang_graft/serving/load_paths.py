"""What clients may load: folders below the roots, under names that mean nothing else.

SGLang reads whatever path a client names; `load.py`, which loads, asks here first.

Target (0.5.17): `TokenizerControlMixin.load_lora_adapter_from_tensors`. Reason: SGLang's scheduler
unpickles tensors that a client sends before anybody asks whether they are supported.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.managers.io_struct import LoRAUpdateOutput, UnloadLoRAAdapterReqInput

from sglang_graft.adapters import AdapterError
from sglang_graft.adapters.folder_names import given_problem
from sglang_graft.adapters.location import Signature, check_files, resolve_below, signature
from sglang_graft.engine.hooks import Hook
from sglang_graft.serving.adapter_store import base_names, on_demand

Original = Callable[..., Awaitable[Any]]


async def checked(
    load: Callable[[Any], Awaitable[Any]], manager: Any, obj: Any, request: Any
) -> Any:
    """What `load` makes of `obj`, if a client may load that.

    Without an HTTP request the operator's own program asks, and may load anything.
    """
    if request is None:
        return await load(obj)
    problem = given_problem(obj.lora_name, base_names(manager))
    if problem is not None:
        return _failed(f"lora_name: {problem}")
    try:
        path, before = await asyncio.to_thread(look, obj.lora_path, on_demand(manager).roots)
    except AdapterError as error:
        return _failed(str(error))
    obj.lora_path = str(path)
    result = await load(obj)
    if result.success and await asyncio.to_thread(signature, path) != before:
        await manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=obj.lora_name))
        return _failed(f"{path}: the folder changed while it was read; try again")
    return result


async def refuse_tensors(original: Original, self: Any, obj: Any, request: Any = None) -> Any:
    """AROUND `load_lora_adapter_from_tensors`: what a client has pickled is never unpickled."""
    return _failed(
        f"adapter {obj.lora_name}: loading from tensors is not supported by Graft yet; save it as a"
        " PEFT folder and use /load_lora_adapter"
    )


def look(path: str, roots: Sequence[Path]) -> tuple[Path, Signature]:
    """The folder to read and what is in it. Raises AdapterError when it must not be read."""
    folder = Path(path)
    if roots:
        folder = resolve_below(path, roots)
        check_files(folder, roots)
    elif not os.path.isdir(path):  # False also for a zero byte
        raise AdapterError(folder, "path", "is not a folder on the server; nothing is fetched")
    return folder, signature(folder)


def _failed(message: str) -> LoRAUpdateOutput:
    return LoRAUpdateOutput(success=False, error_message=message)


_MIXIN = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"

HOOKS = (
    Hook(
        target=f"{_MIXIN}.load_lora_adapter_from_tensors",
        kind="around",
        function=refuse_tensors,
        parameters=("self", "obj", "_"),
        reason="nothing that a client pickled is unpickled",
    ),
)
