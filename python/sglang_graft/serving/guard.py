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

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# Route -> whether SGLang serves adapters on it.
ROUTES = {
    "/v1/messages": True,
    "/v1/responses": False,
    "/v1/score": False,
    "/v1/rerank": False,
    "/api/chat": False,
    "/api/generate": False,
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
        refusal = self.refusal(scope["path"], body)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self.app(scope, replay, send)

    def refusal(self, path: str, body: bytes) -> JSONResponse | None:
        """The answer to a request that must not reach its handler."""
        try:
            model = json.loads(body).get("model")
        except (ValueError, AttributeError):
            return None  # not a JSON object: the handler says so
        if not isinstance(model, str):
            return None
        manager = self.manager()
        loaded, base = manager.lora_ref_cache, manager.served_model_name
        try:
            adapter = names.adapter_of_model(model, loaded, {base, manager.server_args.model_path})
        except KeyError:
            return _error(404, names.unknown(model, loaded, base))
        if adapter is None or ROUTES[path]:
            return None
        return _error(400, f"{path} does not serve adapters yet, wanted the base model {base!r}")


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
