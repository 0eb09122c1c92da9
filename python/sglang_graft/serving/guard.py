"""Routes whose handlers never look for an adapter, or fail on one that is not there.

Seam (0.5.17): the FastAPI application. Reason: SGLang answers `/v1/responses`, `/v1/score`,
`/v1/rerank` and the Ollama routes with the base model whatever adapter `model` names, and turns our
404 on `/v1/messages` into 500. No name may be answered by another model, so look before they do.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from sglang_graft.serving import names
from sglang_graft.serving.adapter_store import base_names, on_demand
from sglang_graft.serving.aliases import aliases
from sglang_graft.serving.on_demand import RefusedError
from sglang_graft.serving.route_table import OLLAMA_CHAT, OLLAMA_GENERATE

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# Route -> whether SGLang serves adapters on it.
ROUTES = {
    "/v1/messages": True,
    "/v1/responses": False,
    "/v1/score": False,
    "/v1/rerank": False,
    OLLAMA_CHAT: False,
    OLLAMA_GENERATE: False,
}


class ModelGuard:
    """ASGI middleware: 404 for unknown names, 400 where a route cannot serve the adapter."""

    def __init__(self, app: Any, manager: Callable[[], Any]) -> None:
        self.app = app
        self.manager = manager

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let everything else pass untouched."""
        if scope["type"] != "http" or scope["path"] not in ROUTES or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = await _read(receive)
        refusal = await self.refusal(scope["path"], body)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self.app(scope, replay, send)

    async def refusal(self, path: str, body: bytes) -> JSONResponse | None:
        """The answer to a request that must not reach its handler."""
        try:
            model = json.loads(body).get("model")
        except (ValueError, AttributeError):
            return None  # not a JSON object: the handler says so
        if not isinstance(model, str):
            return None
        manager = self.manager()
        loaded, base = names.known(manager), manager.served_model_name
        try:
            adapter = names.adapter_of_model(model, loaded, base_names(manager))
        except KeyError:
            folders = on_demand(manager)
            adapter = folders.candidate(model)
            if adapter is None or not await folders.exists(adapter):
                return _error(404, names.unknown(model, loaded, base))
        if adapter is None:
            return None
        if not ROUTES[path]:
            return _error(400, f"{path} serves no adapters yet, wanted the base model {base!r}")
        adapter = aliases(manager).resolve(adapter)
        try:
            async with on_demand(manager).hold([adapter]):
                return None  # and if it is unloaded right now, the handler finds the next one
        except RefusedError as error:
            return _error(error.status_code, str(error))


def _error(status: int, message: str) -> JSONResponse:
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    error = {"message": message, "type": kind, "code": status}
    return JSONResponse({"type": "error", "error": error}, status_code=status)


async def _read(receive: Receive) -> bytes:
    """The whole body; what came of it before the client left."""
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
