"""Routes whose handlers never look for an adapter, or fail on one that is not there.

Seam (0.5.17): the FastAPI application. Reason: SGLang answers `/v1/responses`, `/v1/classify`,
`/v1/score`, `/v1/rerank` and the Ollama routes with the base model whatever adapter a request
names. No name may be answered by another model, so look before they do.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import HTTPException
from starlette.responses import JSONResponse

from sglang_graft.serving.choice import names_of
from sglang_graft.serving.client_routes import select
from sglang_graft.serving.route_table import OLLAMA_CHAT, OLLAMA_GENERATE

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ROUTES = (
    "/v1/responses",
    "/v1/classify",
    "/v1/score",
    "/v1/rerank",
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
)
_FIELDS = ("model", "lora_path", "lora_name")


class ModelGuard:
    """ASGI middleware: 404 for unknown names, 400 where a route cannot serve the adapter."""

    def __init__(self, app: Any, manager: Callable[[], Any]) -> None:
        self.app = app
        self.manager = manager

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let everything else pass untouched."""
        is_ours = scope["type"] == "http" and scope["path"] in ROUTES
        if not is_ours or scope["method"] not in ("POST", "PUT"):
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
            given = json.loads(body)
            fields = {key: given[key] for key in _FIELDS if isinstance(given.get(key), str)}
        except (ValueError, AttributeError, RecursionError):
            return None  # not a JSON object: the handler says so
        manager = self.manager()
        try:
            chosen = await select(manager, **({"model": None} | fields))
        except HTTPException as error:
            return _error(error.status_code, error.detail)
        if not names_of(chosen):
            return None
        base = manager.served_model_name
        return _error(400, f"{path} serves no adapters yet, wanted the base model {base!r}")


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
