"""SGLang's routes for clients, with every way to name an adapter on each of them.

Seam (0.5.17): the FastAPI application. Each route below stands in the place of SGLang's own, takes
a body that knows `lora_name` (and `model`, where SGLang does not look at it), finds out which
adapter is meant before anything is sent, and then calls SGLang's handler. Reasons: a name that is
not looked at is answered by the base model, and a stream on /generate has begun when SGLang looks
up names, so that a wrong one is only its last event.
"""

import dataclasses
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Body, Depends, HTTPException, Request
from pydantic import TypeAdapter, ValidationError
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import VertexGenerateReqInput

from sglang_graft.serving import (
    bad_input,
    chat_templates,
    names,
    request_log,
    request_metrics,
    tenants,
)
from sglang_graft.serving.adapter_store import base_names, on_demand
from sglang_graft.serving.aliases import aliases
from sglang_graft.serving.choice import ConflictError, Named, agreed, names_of, only
from sglang_graft.serving.client_bodies import (
    ChatBody,
    CompletionBody,
    CountBody,
    EmbeddingBody,
    EncodeBody,
    GenerateBody,
    MessagesBody,
    TokenizeBody,
)
from sglang_graft.serving.on_demand import RefusedError
from sglang_graft.serving.route_table import VERTEX

_TRIES = 3  # of a chat whose adapter is replaced, template and all, while it is on its way

Answer = Callable[[], Awaitable[Any]]


async def select(
    manager: Any, *, model: str | None, lora_path: Named = None, lora_name: str | None = None
) -> Named:
    """What the fields name. HTTPException: 400 when they disagree, 404 for what nobody loaded."""
    loaded = names.known(manager)
    folders = on_demand(manager)
    try:
        adapter = names.adapter_of_model(model or "", loaded, base_names(manager))
    except KeyError:
        assert model is not None
        adapter = folders.candidate(model) or model
    try:
        chosen = agreed(model=adapter, lora_path=lora_path, lora_name=lora_name)
    except ConflictError as error:
        raise _refusal(manager, adapter, HTTPStatus.BAD_REQUEST, str(error)) from None
    for name in names_of(chosen):
        if not tenants.may_use(name):
            raise _refusal(manager, name, HTTPStatus.FORBIDDEN, tenants.forbidden(name))
        if name not in loaded and not await folders.exists(name):
            asked = model if name == adapter and model else name
            message = names.unknown(asked, loaded, manager.served_model_name)
            request_metrics.counts().turned_away()
            raise _refusal(manager, name, HTTPStatus.NOT_FOUND, message)
    return chosen


def _refusal(manager: Any, name: str | None, status: HTTPStatus, message: str) -> HTTPException:
    request_log.turned_away(manager, name, status, message)
    return HTTPException(status, message)


async def _select(body: Any, model: str | None) -> Named:
    """The same for a body, and loaded: what cannot be used is refused before a stream begins."""
    path = getattr(body, "lora_path", None)
    chosen = await select(_manager(), model=model, lora_path=path, lora_name=body.lora_name)
    await _load(names_of(chosen))
    return chosen


async def _load(adapters: list[str]) -> None:
    try:
        async with on_demand(_manager()).hold(adapters):
            return  # one that is unloaded right now is looked for again when SGLang resolves it
    except RefusedError as error:
        raise HTTPException(error.status_code, str(error)) from None


async def _native(body: Any) -> None:
    body.lora_path = await _select(body, body.model)


async def _openai(body: Any) -> None:
    """Let `model` of the answer name the adapter, whichever field of the request did."""
    chosen = await _select(body, body.model)
    if names.names_base(body.model, base_names(_manager())):
        body.model = only(chosen) or body.model
    if hasattr(body, "lora_path"):
        body.lora_path = chosen


async def _chat(body: Any, answer: Answer) -> Any:
    """The same, rendered with the adapter's own chat template if it has one."""
    await _openai(body)
    manager = _manager()
    adapter = aliases(manager).resolve(only(getattr(body, "lora_path", None)))
    for _ in range(_TRIES):
        used = chat_templates.use(manager, adapter, tools=bool(body.tools))
        result = await answer()
        if used is None or not used.stale:
            return result
        await _load([used.name])
    return result


def _manager() -> Any:
    return http_server.get_global_state().tokenizer_manager


async def generate(obj: Annotated[GenerateBody, Body()], request: Request) -> Any:
    """SGLang's /generate."""
    await _native(obj)
    return await http_server.generate_request(obj, request)


async def encode(obj: Annotated[EncodeBody, Body()], request: Request) -> Any:
    """SGLang's /encode."""
    await _native(obj)
    return await http_server.encode_request(obj, request)


async def classify(obj: Annotated[EncodeBody, Body()], request: Request) -> Any:
    """SGLang's /classify."""
    await _native(obj)
    return await http_server.classify_request(obj, request)


async def completions(request: CompletionBody, raw_request: Request) -> Any:
    """OpenAI's completions."""
    await _openai(request)
    return await http_server.openai_v1_completions(request, raw_request)


async def chat(request: ChatBody, raw_request: Request) -> Any:
    """OpenAI's chat completions; SageMaker's /invocations too."""
    return await _chat(
        request, lambda: http_server.openai_v1_chat_completions(request, raw_request)
    )


async def embeddings(request: EmbeddingBody, raw_request: Request) -> Any:
    """OpenAI's embeddings."""
    await _openai(request)
    result = await http_server.openai_v1_embeddings(request, raw_request)
    if only(request.lora_path) and hasattr(result, "model"):
        result.model = request.model  # SGLang puts the path of the base model there
    return result


async def messages(request: MessagesBody, raw_request: Request) -> Any:
    """Anthropic's messages."""
    return await _anthropic(request, raw_request, http_server.anthropic_v1_messages)


async def count_tokens(request: CountBody, raw_request: Request) -> Any:
    """Anthropic's token counts."""
    return await _anthropic(request, raw_request, http_server.anthropic_v1_count_tokens)


async def _anthropic(body: Any, raw_request: Request, handler: Callable[..., Any]) -> Any:
    try:
        with bad_input.body_errors():
            return await _chat(body, lambda: handler(body, raw_request))
    except bad_input.BodyError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None


async def tokenize(request: TokenizeBody, raw_request: Request) -> Any:
    """Tokens of a text, or of messages."""
    return await _chat(request, lambda: http_server.openai_v1_tokenize(request, raw_request))


async def vertex(
    vertex_req: Annotated[VertexGenerateReqInput, Body()], raw_request: Request
) -> Any:
    """Vertex AI: /generate whose fields but the inputs lie in `parameters`."""
    parameters = dict(vertex_req.parameters or {})
    unknown = sorted(parameters.keys() - _VERTEX_FIELDS)
    if unknown:
        message = f"parameters: no field is named {', '.join(unknown)}"
        raise HTTPException(HTTPStatus.BAD_REQUEST, message)
    try:
        _GENERATE.validate_python(parameters)  # SGLang takes any type here
    except ValidationError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"parameters: {error}") from None
    fields = {key: parameters.pop(key, None) for key in ("model", "lora_path", "lora_name")}
    chosen = await select(_manager(), **fields)
    await _load(names_of(chosen))
    vertex_req.parameters = parameters | {"lora_path": chosen}
    return await http_server.vertex_generate(vertex_req, raw_request)


_GENERATE: TypeAdapter[Any] = TypeAdapter(GenerateBody)
# The inputs come from the instances.
_VERTEX_FIELDS = {f.name for f in dataclasses.fields(GenerateBody)}
_VERTEX_FIELDS -= {"text", "input_ids", "input_embeds", "image_data"}
_JSON = [Depends(http_server.validate_json_request)]

# Path -> handler, and what SGLang's own route depends on.
ROUTES: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "/generate": (generate, []),
    "/encode": (encode, []),
    "/classify": (classify, []),
    "/v1/completions": (completions, _JSON),
    "/v1/chat/completions": (chat, _JSON),
    "/invocations": (chat, []),
    "/v1/embeddings": (embeddings, _JSON),
    "/v1/messages": (messages, _JSON),
    "/v1/messages/count_tokens": (count_tokens, _JSON),
    "/v1/tokenize": (tokenize, _JSON),
    "/tokenize": (tokenize, _JSON),
    VERTEX: (vertex, []),
}


def replace_routes(app: Any) -> None:
    """Put ours in the places of SGLang's, with the same methods."""
    routes = app.router.routes
    for place, stock in enumerate(routes):
        path = getattr(stock, "path", None)
        if path in ROUTES:
            handler, dependencies = ROUTES[path]
            routes[place] = app.router.route_class(
                path,
                handler,
                methods=stock.methods,
                dependencies=dependencies,
                response_model=None,
                include_in_schema=stock.include_in_schema,
            )
