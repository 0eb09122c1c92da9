"""Loading for the adapter roots, by SGLang's own load and unload, and the check before it."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

from sglang_graft import config
from sglang_graft.adapters import AdapterError, LinearSpec, ModelSpec
from sglang_graft.adapters.headers import Limits, check_headers
from sglang_graft.adapters.location import check_size
from sglang_graft.engine.report import MODEL_KEY
from sglang_graft.serving import chat_templates
from sglang_graft.serving.load_input import LoadInput
from sglang_graft.serving.on_demand import OnDemand

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_graft_on_demand"


class ManagerStore:
    """A `Store` over SGLang's tokenizer manager."""

    def __init__(self, manager: Any, max_bytes: int) -> None:
        self.manager = manager
        self.max_bytes = max_bytes
        self._model: tuple[ModelSpec, Limits] | None = None

    def loaded(self, name: str) -> str | None:
        """The id under which requests reach `name`."""
        ref = self.manager.lora_ref_cache.get(name)
        return None if ref is None else str(ref.lora_id)

    async def load(self, name: str, path: Path) -> str | None:
        """Load `path` under the free name."""
        return await self._load(LoadInput(lora_name=name, lora_path=str(path)), path)

    async def _load(self, request: LoadInput, path: Path) -> str | None:
        name = request.lora_name
        error = _error(await self.manager.load_lora_adapter(request))
        # It goes to clients, who are not told where folders lie.
        return error and error.replace(f"{path}/", "").replace(str(path), name)

    async def unload(self, name: str) -> str | None:
        """Unload; requests under way end on the old weights."""
        request = UnloadLoRAAdapterReqInput(lora_name=name)
        return _error(await self.manager.unload_lora_adapter(request))

    async def replace(self, name: str, path: Path) -> str | None:
        """New weights in one step. When they cannot be read the name is free: a folder that holds
        something else by now is not served by what it held before. A pin stays if it can."""
        ref = self.manager.lora_ref_cache.get(name)
        pinned = bool(ref is not None and ref.pinned)
        request = LoadInput(lora_name=name, lora_path=str(path), pinned=pinned, load_inplace=True)
        error = await self._load(request, path)
        if error is not None and pinned:
            logger.warning("Adapter %s is pinned, and was not replaced so: %s", name, error)
            request = LoadInput(lora_name=name, lora_path=str(path), load_inplace=True)
            error = await self._load(request, path)
        if error is not None:
            await self.unload(name)
        return error

    async def check(self, path: Path) -> str | None:
        """Headers against the model that the scheduler serves, in a thread."""
        if self._model is None:
            states = await self.manager.get_internal_state()
            self._model = model_of(states[0][MODEL_KEY])
        return await asyncio.to_thread(_problem, path, *self._model, self.max_bytes)


def on_demand(manager: Any) -> OnDemand:
    """The adapter roots of this server; the same object for every call."""
    made: OnDemand | None = getattr(manager, _ATTRIBUTE, None)
    if made is None:
        options = config.published() or config.GraftConfig()
        made = OnDemand(
            options.adapter_roots,
            options.adapter_scan_seconds,
            ManagerStore(manager, options.max_adapter_mb * 2**20),
            base_names(manager) if options.adapter_root else (),
        )
        setattr(manager, _ATTRIBUTE, made)
    return made


def base_names(manager: Any) -> set[str]:
    """What requests may call the base model."""
    return {manager.served_model_name, manager.server_args.model_path}


def _error(result: Any) -> str | None:
    return None if result.success else str(result.error_message)


def model_of(report: dict[str, Any]) -> tuple[ModelSpec, Limits]:
    """What adapters are checked against, from the scheduler's report."""
    spec = ModelSpec(
        layers=report["layers"],
        linears=tuple(LinearSpec(**linear) for linear in report["linears"]),
        dtype=getattr(torch, report["dtype"]),
        layer_prefix=report["layer_prefix"],
        vocab_size=report["vocab_size"],
    )
    return spec, Limits(report["max_rank"], report["pool_bytes"])


def _problem(path: Path, spec: ModelSpec, limits: Limits, max_bytes: int) -> str | None:
    try:
        check_size(path, max_bytes)
        check_headers(path, spec, limits)
        chat_templates.read(path)
    except AdapterError as error:
        return f"{error.file.name}: {error.item}: {error.reason}"
    return None
