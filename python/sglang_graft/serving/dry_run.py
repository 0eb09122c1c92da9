"""What a load would do, without doing it: the folder is read and measured, and nothing is kept."""

import asyncio
from pathlib import Path
from typing import Any

from sglang_graft import config
from sglang_graft.adapters import AdapterError, ModelSpec, TileMap, measure, read_adapter
from sglang_graft.adapters.folder_names import given_problem
from sglang_graft.adapters.folder_scan import find
from sglang_graft.adapters.location import check_size
from sglang_graft.engine.report import KEY, MODEL_KEY
from sglang_graft.serving import adapter_admin, load_paths
from sglang_graft.serving.adapter_admin import AdminError, NewAdapter
from sglang_graft.serving.adapter_store import base_names, model_of, on_demand
from sglang_graft.serving.aliases import taken


async def load_forecast(manager: Any, wanted: NewAdapter) -> dict[str, Any]:
    """Whether the adapter would be applied, and fit on the device now, and what would leave.

    The load itself takes no room there: the first request, a pin or "warm" does. Raises AdminError
    for what a load would refuse. DoRA is measured without its base weights.
    """
    name = wanted.name
    problem = given_problem(name, base_names(manager)) or taken(manager, name)
    if problem is not None:
        raise AdminError(400, f"name: {problem}")
    if name in manager.lora_ref_cache and not wanted.load_inplace:
        raise AdminError(409, adapter_admin.is_loaded(name))
    (state,) = await manager.get_internal_state()
    spec, limits = model_of(state[MODEL_KEY])
    try:
        path = await _folder(manager, wanted)
        tiles = TileMap(spec, state[KEY]["page_bytes"], max_rank=limits.rank)
        found = await asyncio.to_thread(_measure, path, spec, tiles)
    except AdapterError as error:
        raise AdminError(400, str(error)) from None
    identity, pages, warnings = found
    pool = await adapter_admin.foresee(
        manager, identity=identity, pages=pages, name=name, pin=wanted.pinned
    )
    return {"name": name, "path": str(path), "identity": identity, **pool, "warnings": warnings}


async def _folder(manager: Any, wanted: NewAdapter) -> Path:
    folders = on_demand(manager)
    if wanted.path is not None:
        return (await asyncio.to_thread(load_paths.look, wanted.path, folders.roots))[0]
    folder = await asyncio.to_thread(find, wanted.name, folders.roots, folders.reserved)
    if folder is None:
        raise AdminError(404, f"adapter {wanted.name!r}: no such folder below a root")
    if folder.refusal is not None:
        raise AdminError(400, f"adapter {wanted.name!r}: {folder.refusal}")
    return folder.path


def _measure(path: Path, spec: ModelSpec, tiles: TileMap) -> tuple[str, int, list[str]]:
    options = config.published() or config.GraftConfig()
    check_size(path, options.max_adapter_mb * 2**20)
    adapter = read_adapter(path, spec)
    return adapter.identity, measure(adapter, tiles)[1], list(adapter.warnings)
