"""What the routes under /graft/adapters do: SGLang's load and unload, and operations of the pool.

A load of a large adapter takes its time in the scheduler's threads; here it is awaited. A warm-up
is asked for again and again until it has ended or `WARM_SECONDS` are over.
"""

import asyncio
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

from sglang_graft.serving.adapter_store import on_demand
from sglang_graft.serving.aliases import aliases
from sglang_graft.serving.control import RefusedOperationError, ask
from sglang_graft.serving.lifetimes import lifetimes
from sglang_graft.serving.load_input import LoadInput
from sglang_graft.serving.on_demand import RefusedError
from sglang_graft.serving.registry import in_flight

WARM_SECONDS = 60.0
POLL_SECONDS = 0.02
MOST_PRIORITY = 16


class AdminError(ValueError):
    """A request that cannot be granted, with the HTTP status that says so."""

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status_code


class Settings(BaseModel):
    """What can be changed while an adapter is loaded. A field that is left out stays as it is."""

    model_config = ConfigDict(extra="forbid")

    pinned: bool = Field(False, description="Stays on the device.")
    ttl_seconds: float | None = Field(
        None, gt=0, le=1e9, allow_inf_nan=False, description="Unloaded when unused for that long."
    )
    priority: int = Field(
        0,
        ge=-MOST_PRIORITY,
        le=MOST_PRIORITY,
        description="Higher stays longer on the device and the host, with its KV.",
    )
    warm: str | None = Field(
        None, pattern="^(device|host)$", description="Bring it to the device, or to host memory."
    )


class NewAdapter(Settings):
    """Body of POST /graft/adapters."""

    name: str
    path: str | None = Field(
        None, description="Folder on the server; left out, one below --graft-adapter-root."
    )
    load_inplace: bool = Field(False, description="Replace a loaded adapter of that name.")


async def listing(manager: Any) -> dict[str, Any]:
    """Loaded adapters with all that is known of them, folders that could be loaded, and aliases."""
    rows = await _rows(manager)
    folders = await on_demand(manager).listed()
    return {
        "adapters": [rows[name] for name in sorted(rows)],
        "available": [{"name": f.name, "path": str(f.path)} for f in folders],
        "aliases": dict(sorted(aliases(manager).table.items())),
    }


async def one(manager: Any, name: str) -> dict[str, Any]:
    """One loaded adapter."""
    _loaded(manager, name)
    row = (await _rows(manager)).get(name)
    if row is None:
        raise AdminError(409, f"adapter {name!r} is being loaded or replaced; try again")
    return row


async def load(manager: Any, wanted: NewAdapter, request: Any) -> dict[str, Any]:
    """Load or replace an adapter, then apply its settings. A failed setting unloads nothing."""
    name, freed = wanted.name, {}
    replaces = name in manager.lora_ref_cache
    if replaces and not wanted.load_inplace:
        raise AdminError(409, is_loaded(name))
    if wanted.path is None:
        await _load_folder(manager, name)
    else:
        body = LoadInput(
            lora_name=name,
            lora_path=wanted.path,
            pinned=wanted.pinned,
            load_inplace=wanted.load_inplace,
        )
        result = await manager.load_lora_adapter(body, request)
        if not result.success:
            raise AdminError(400, str(result.error_message))
        freed = _freed(result)
    if not replaces and "ttl_seconds" not in wanted.model_fields_set:
        lifetimes(manager).set(name, None)
    return {**await change(manager, name, wanted), **freed}


async def change(manager: Any, name: str, wanted: Settings) -> dict[str, Any]:
    """Apply the settings that were given, the one that may be refused first."""
    ref, given = _loaded(manager, name), wanted.model_fields_set
    asked: dict[str, Any] = {"id": ref.lora_id, "name": name}
    left: list[dict[str, Any]] = []
    if "pinned" in given:
        done = await _ask(manager, "pin_adapter", pinned=wanted.pinned, **asked)
        left = done["left"]
        if _loaded(manager, name).lora_id == ref.lora_id:
            manager.lora_ref_cache[name] = manager.lora_registry.repin(name, wanted.pinned)
    if "priority" in given:
        await _ask(manager, "prioritize_adapter", priority=wanted.priority, **asked)
    if "ttl_seconds" in given:
        lifetimes(manager).set(name, wanted.ttl_seconds)
    answer: dict[str, Any] = {}
    if wanted.warm is not None:
        answer["warm"] = await _warm(manager, asked, wanted.warm)
        left += answer["warm"].pop("left")
    return {"adapter": await one(manager, name), "left": left, **answer}


async def unload(manager: Any, name: str, request: Any) -> dict[str, Any]:
    """Unload an adapter; its bytes go with its last request."""
    _not_aliased(manager, name)
    result = await manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name), request)
    if not result.success:
        raise AdminError(409, str(result.error_message))
    return {"name": name, **_freed(result), "loaded_again_on_use": await _returns(manager, name)}


async def unload_forecast(manager: Any, name: str) -> dict[str, Any]:
    """What `unload` would say now."""
    ref = _not_aliased(manager, name)
    found = await _ask(manager, "release_adapter", id=ref.lora_id, name=name)
    requests = in_flight(manager)[ref.lora_id]
    again = await _returns(manager, name)
    return {"name": name, **found, "requests": requests, "loaded_again_on_use": again}


async def why(manager: Any, name: str, *, pin: bool = False) -> dict[str, Any]:
    """Whether a loaded adapter would fit on the device now, and what would leave for it."""
    ref = _loaded(manager, name)
    found = await _ask(manager, "foresee_adapter", id=ref.lora_id, name=name, pin=pin)
    return {"name": name, "state": (await one(manager, name))["state"], **found}


def is_loaded(name: str) -> str:
    """The refusal of a load under a name that is taken."""
    return f'adapter {name!r} is loaded already; unload it, or send "load_inplace": true'


async def foresee(manager: Any, **weights: Any) -> dict[str, Any]:
    """Whether weights that were only read would fit; see `engine/adapter_control`."""
    return await _ask(manager, "foresee_adapter", **weights)


async def _ask(manager: Any, operation: str, **arguments: Any) -> dict[str, Any]:
    try:
        return await ask(manager, operation, **arguments)
    except RefusedOperationError as error:
        raise AdminError(409, str(error)) from None


async def _rows(manager: Any) -> dict[str, dict[str, Any]]:
    """By name. What the scheduler does not know yet, or no longer, is left out."""
    found = (await ask(manager, "adapters"))["adapters"]
    registry, busy, times = manager.lora_registry, in_flight(manager), lifetimes(manager)
    rows = {}
    for name, ref in registry.get_all_adapters().items():
        if (row := found.get(ref.lora_id)) is None:
            continue
        rows[name] = {
            "name": name,
            "path": ref.lora_path,
            **row,
            "idle_seconds": round(times.idle(name), 3),
            "ttl_seconds": times.get(name),
            "aliases": aliases(manager).of(name),
            "requests": busy[ref.lora_id],
            "below_root": on_demand(manager).loaded_here(name),
        }
    return rows


async def _warm(manager: Any, asked: dict[str, Any], to: str) -> dict[str, Any]:
    failures, left = None, []
    clock = asyncio.get_running_loop().time
    end = clock() + WARM_SECONDS
    while True:
        reply = await _ask(manager, "warm_adapter", to=to, failures=failures, **asked)
        failures, step = reply["failures"], reply["step"]
        left += reply["left"]
        if step != "coming" or clock() > end:
            break
        await asyncio.sleep(POLL_SECONDS)
    reasons = {
        "done": None,
        "no room": "running requests, pins and what is promised to them hold the pool",
        "coming": f"not there after {WARM_SECONDS:.0f} s; it goes on",
    }
    missing = reply["missing_bytes"]
    return {
        "to": to,
        "done": step == "done",
        "missing_bytes": missing,
        "reason": reasons[step],
        "left": left,
    }


async def _load_folder(manager: Any, name: str) -> None:
    """Load the folder `name` below the roots, as a request would."""
    if on_demand(manager).candidate(name) != name:
        raise AdminError(400, f"adapter {name!r}: wanted a path, or a folder's name below a root")
    try:
        async with on_demand(manager).hold([name]):
            if name in manager.lora_ref_cache:
                return
    except RefusedError as error:
        raise AdminError(error.status_code, str(error)) from None
    raise AdminError(404, f"adapter {name!r}: no such folder below --graft-adapter-root")


async def _returns(manager: Any, name: str) -> bool:
    return await on_demand(manager).exists(name)


def _loaded(manager: Any, name: str) -> Any:
    """The registration of a loaded adapter."""
    ref = manager.lora_registry.ref(name)
    if ref is None:
        target = aliases(manager).table.get(name)
        hint = "" if target is None else f"; it is an alias of {target!r}"
        raise AdminError(404, f"No adapter named {name!r} is loaded{hint}.")
    return ref


def _not_aliased(manager: Any, name: str) -> Any:
    ref, leading = _loaded(manager, name), aliases(manager).of(name)
    if leading:
        some = ", ".join(map(repr, leading))
        raise AdminError(409, f"{some} leads to {name!r}; switch or delete that alias first")
    return ref


def _freed(result: Any) -> dict[str, Any]:
    fields = ("freed_bytes", "following_bytes", "requests")
    return {field: getattr(result, field) for field in fields}
