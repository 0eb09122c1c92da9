"""Which adapter a request names, and 404 for a name that nobody loaded.

Targets (0.5.17): `OpenAIServingBase._resolve_lora_path` (OpenAI routes) and
`TokenizerManager._validate_and_resolve_lora` (all requests). Reason: SGLang answers an unknown
`model` with the base model and an unknown `lora_path` with 400; a typo must never be answered by
another model.
"""

from collections.abc import Awaitable, Callable, Collection
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException

from sglang_graft.engine.hooks import Hook

# What clients send as `model` when they do not care; SGLang accepts any text there.
_ANY_MODEL = ("", "default")
_over_http: list[bool] = []


class UnknownAdapterError(ValueError):
    """No adapter of that name is loaded. SGLang puts `status_code` into streamed errors."""

    status_code = int(HTTPStatus.NOT_FOUND)


def serve_over_http() -> None:
    """From now on unknown names become HTTP errors rather than ValueErrors of an Engine."""
    if not _over_http:
        _over_http.append(True)


def unknown(name: str, loaded: Collection[str], base: str) -> str:
    """The message for a name that is neither an adapter nor the base model."""
    names = ", ".join(sorted(loaded)) or "none"
    return f"No adapter or model named {name!r} is loaded. Loaded adapters: {names}. Base: {base}."


def reserved(name: str, base_names: Collection[str]) -> str | None:
    """Why an adapter may not have this name: requests for it would mean the base model."""
    if name in _ANY_MODEL or name in base_names:
        return f"adapter name {name!r}: requests with it mean the base model; choose another name"
    return None


def adapter_of_model(
    model: str, loaded: Collection[str], base_names: Collection[str]
) -> str | None:
    """The adapter that an OpenAI `model` field names, None for the base model.

    A whole name wins over `base:adapter`, so names with a colon stay reachable. KeyError when it
    names nothing.
    """
    if model in loaded:
        return model
    if model in base_names or model in _ANY_MODEL:
        return None
    _, colon, adapter = model.partition(":")
    if colon and adapter.strip() in loaded:
        return adapter.strip()
    raise KeyError(model)


def resolve_openai(
    original: Callable[..., Any], self: Any, request_model: str, explicit_lora_path: Any
) -> Any:
    """AROUND `_resolve_lora_path`: the `model` field decides, then `lora_path`."""
    manager = self.tokenizer_manager
    loaded = manager.lora_ref_cache
    base = {manager.served_model_name, manager.server_args.model_path}
    try:
        adapter = adapter_of_model(request_model, loaded, base)
    except KeyError:
        message = unknown(request_model, loaded, manager.served_model_name)
        raise HTTPException(status_code=HTTPStatus.NOT_FOUND, detail=message) from None
    chosen = explicit_lora_path if adapter is None else adapter
    for name in chosen if isinstance(chosen, list) else [chosen]:
        if name and name not in loaded:
            message = unknown(name, loaded, manager.served_model_name)
            raise HTTPException(status_code=HTTPStatus.NOT_FOUND, detail=message)
    return chosen


async def resolve_native(original: Callable[..., Awaitable[None]], self: Any, obj: Any) -> None:
    """AROUND `_validate_and_resolve_lora`."""
    names = obj.lora_path if isinstance(obj.lora_path, list) else [obj.lora_path]
    wanted = getattr(obj, "batch_size", 1) * getattr(obj, "parallel_sample_num", 1)
    if isinstance(obj.lora_path, list) and len(names) != wanted:
        raise ValueError(
            f"lora_path: wanted one name for each of {wanted} samples, got {len(names)}"
        )
    for name in names:
        if name and name not in self.lora_ref_cache:
            message = unknown(name, self.lora_ref_cache, self.served_model_name)
            # A stream has begun when this runs; SGLang turns a ValueError into its last event.
            if _over_http and not getattr(obj, "stream", False):
                raise HTTPException(status_code=HTTPStatus.NOT_FOUND, detail=message)
            raise UnknownAdapterError(message)
    await original(self, obj)


HOOKS = (
    Hook(
        target="sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._resolve_lora_path",
        kind="around",
        function=resolve_openai,
        parameters=("self", "request_model", "explicit_lora_path"),
        reason="`model: NAME` selects an adapter, unknown names are 404",
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_and_resolve_lora",
        kind="around",
        function=resolve_native,
        parameters=("self", "obj"),
        reason="unknown adapters are 404 and name the loaded ones",
    ),
)
