"""`/v1/models` and `/v1/models/NAME` with the adapters that a request would load.

Both answer before SGLang's own routes of the same paths. Reason: SGLang lists what is loaded, and
knows no adapter by name.
"""

from typing import Any

from fastapi.responses import JSONResponse
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import ModelCard

from sglang_graft.serving import names, tenants
from sglang_graft.serving.adapter_store import on_demand
from sglang_graft.serving.aliases import aliases


async def models() -> Any:
    """The base model, loaded adapters, folders that a request could load, and aliases.

    `root` is where the weights lie, and of an alias the adapter; `parent` is the base model of an
    adapter, as vLLM has them.
    """
    manager: Any = http_server.get_global_state().tokenizer_manager
    listing = await http_server.available_models()
    for card in listing.data:
        if card.parent is None:
            card.root = manager.server_args.model_path
    table = aliases(manager).table
    for folder in await on_demand(manager).listed():
        if folder.name not in table:
            listing.data.append(_card(folder.name, str(folder.path), manager))
    for alias, adapter in sorted(table.items()):
        listing.data.append(_card(alias, adapter, manager))
    listing.data = tenants.visible_cards(listing.data)
    return listing


async def model(model: str) -> Any:
    """One of them, 404 for a name that requests could not use."""
    manager: Any = http_server.get_global_state().tokenizer_manager
    if not tenants.may_use(None if model == manager.served_model_name else model):
        return tenants.no_such_model(model)
    ref = manager.lora_ref_cache.get(model)
    if ref is not None:
        return _card(model, ref.lora_path, manager)
    if (adapter := aliases(manager).table.get(model)) is not None:
        return _card(model, adapter, manager)
    for folder in await on_demand(manager).listed():
        if folder.name == model:
            return _card(model, str(folder.path), manager)
    card = await http_server.retrieve_model(model)
    if isinstance(card, ModelCard):
        card.root = manager.server_args.model_path
        return card
    message = names.unknown(model, manager.lora_ref_cache, manager.served_model_name)
    error = {"message": message, "type": "invalid_request_error", "param": "model"}
    return JSONResponse({"error": error | {"code": "model_not_found"}}, status_code=404)


def _card(name: str, root: str, manager: Any) -> ModelCard:
    return ModelCard(id=name, root=root, parent=manager.served_model_name, max_model_len=None)


def add_to(app: Any) -> None:
    """Put both in front of the routes that `app` has."""
    app.add_api_route("/v1/models/{model:path}", model, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models", models, methods=["GET"], response_model=None)
    for _ in range(2):
        app.router.routes.insert(0, app.router.routes.pop())
