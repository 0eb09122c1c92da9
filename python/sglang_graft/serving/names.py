"""Which adapter a request names, and 404 for a name that nobody loaded.

Targets (0.5.17): `OpenAIServingBase._resolve_lora_path` (OpenAI routes) and
`TokenizerManager._validate_and_resolve_lora` (all requests). Reason: SGLang answers an unknown
`model` with the base model and an unknown `lora_path` with 400; a typo must never be answered by
another model.
"""

from collections import ChainMap
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException

from sglang_graft.adapters.folder_names import ANY_MODEL, without_base
from sglang_graft.engine.hooks import Hook
from sglang_graft.serving import chat_templates, tenants
from sglang_graft.serving.adapter_store import base_names, on_demand
from sglang_graft.serving.aliases import aliases
from sglang_graft.serving.choice import agreed
from sglang_graft.serving.on_demand import RefusedError

_over_http: list[bool] = []
# Set in the request's own task: on OpenAI routes nothing has been sent when a stream is resolved.
_before_stream: ContextVar[bool] = ContextVar("before_stream", default=False)


class UnknownAdapterError(ValueError):
    """No adapter of that name is loaded. SGLang puts `status_code` into streamed errors."""

    status_code = int(HTTPStatus.NOT_FOUND)


def serve_over_http() -> None:
    """From now on unknown names become HTTP errors rather than ValueErrors of an Engine."""
    if not _over_http:
        _over_http.append(True)


def nothing_sent() -> bool:
    """Whether the answer to the request under way has not begun, though it will be a stream."""
    return _before_stream.get()


def unknown(name: str, loaded: Collection[str], base: str) -> str:
    """The message for a name that is neither an adapter nor the base model."""
    names = ", ".join(sorted(tenants.visible(loaded))) or "none"
    return f"No adapter or model named {name!r} is loaded. Loaded adapters: {names}. Base: {base}."


def reserved(name: str, base_names: Collection[str]) -> str | None:
    """Why an adapter may not have this name: requests for it would mean the base model."""
    if name in ANY_MODEL or name in base_names:
        return f"adapter name {name!r}: requests with it mean the base model; choose another name"
    if (rest := without_base(name, base_names)) != name:
        return (
            f"adapter name {name!r}: requests with it mean an adapter {rest!r} of the base model;"
            " choose another name"
        )
    return None


def names_base(model: str, base_names: Collection[str]) -> bool:
    """Whether a `model` field names the base model."""
    return model in base_names or model in ANY_MODEL


def adapter_of_model(
    model: str, loaded: Collection[str], base_names: Collection[str]
) -> str | None:
    """The adapter that an OpenAI `model` field names, None for the base model.

    That is its whole name, or `BASE:NAME` with one of the base model's own names before it; no
    adapter may have a name of that form. KeyError when it names nothing.
    """
    if model in loaded:
        return model
    if names_base(model, base_names):
        return None
    if (adapter := without_base(model, base_names)) in loaded:
        return adapter
    raise KeyError(model)


def known(manager: Any) -> Collection[str]:
    """What requests may name now besides the base model and folders: adapters and aliases."""
    return ChainMap(manager.lora_ref_cache, aliases(manager).table)


def resolve_openai(
    original: Callable[..., Any], self: Any, request_model: str, explicit_lora_path: Any
) -> Any:
    """AROUND `_resolve_lora_path`: what `model` and `lora_path` name; both must agree."""
    manager = self.tokenizer_manager
    loaded = known(manager)
    _before_stream.set(True)
    try:
        adapter = adapter_of_model(request_model, loaded, base_names(manager))
    except KeyError:
        # A name that a folder might have: `resolve_native` looks, which takes time.
        adapter = on_demand(manager).candidate(request_model)
        if adapter is None:
            message = unknown(request_model, loaded, manager.served_model_name)
            raise HTTPException(status_code=HTTPStatus.NOT_FOUND, detail=message) from None
    chosen = agreed(model=adapter, lora_path=explicit_lora_path)
    for name in chosen if isinstance(chosen, list) else [chosen]:
        if name and name not in loaded and on_demand(manager).candidate(name) is None:
            message = unknown(name, loaded, manager.served_model_name)
            raise HTTPException(status_code=HTTPStatus.NOT_FOUND, detail=message)
    return chosen


async def resolve_native(original: Callable[..., Awaitable[None]], self: Any, obj: Any) -> None:
    """AROUND `_validate_and_resolve_lora`. Aliases end here: no switch falls between."""
    obj.lora_id = None  # a field of SGLang's body, which the scheduler would look up unchecked
    obj.lora_path = aliases(self).resolve(obj.lora_path)
    names = obj.lora_path if isinstance(obj.lora_path, list) else [obj.lora_path]
    wanted = getattr(obj, "batch_size", 1) * getattr(obj, "parallel_sample_num", 1)
    if isinstance(obj.lora_path, list) and len(names) != wanted:
        raise ValueError(
            f"lora_path: wanted one name for each of {wanted} samples, got {len(names)}"
        )
    try:
        async with on_demand(self).hold(names):
            for name in names:
                if name and name not in self.lora_ref_cache:
                    message = unknown(name, known(self), self.served_model_name)
                    raise UnknownAdapterError(message)
            await original(self, obj)
        chat_templates.check_accepted(self, obj.lora_id)
    except (UnknownAdapterError, RefusedError, chat_templates.StaleError) as error:
        # A stream has begun when this runs; SGLang turns a ValueError into its last event.
        if not _over_http or (getattr(obj, "stream", False) and not _before_stream.get()):
            raise
        raise HTTPException(status_code=error.status_code, detail=str(error)) from None


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
