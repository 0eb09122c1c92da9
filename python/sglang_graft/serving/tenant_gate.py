"""Which key a request brings, and whether it may pass: 401, 403, 429.

Seam (0.5.17): the FastAPI application. Reasons: SGLang knows one API key and one admin key; it lets
websockets pass without any, and answers /metrics and /server_info, which name every adapter, to
everybody. This is the outermost part of ours, inside SGLang's own check of the admin key.

Names are looked at here, before anything has been sent, so that streams get their 403 too. What
counts in the end is `tenant_requests`, which every request passes.
"""

import hmac
import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from sglang_graft.adapters.folder_names import ANY_MODEL
from sglang_graft.serving import tenants
from sglang_graft.serving.adapter_store import base_names
from sglang_graft.serving.route_table import OLLAMA_SHOW, OLLAMA_TAGS, Does, what_it_does
from sglang_graft.tenants.bucket import retry_after

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

OPEN = {"/health", "/health/ready", "/health_generate", "/ping"}
"""Answered without any key, for whoever watches the server."""
TENANTS_READ = {
    *("/", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", "/v1/models"),
    *("/model_info", "/get_model_info", "/weight_version", "/get_weight_version"),
    *(OLLAMA_TAGS, OLLAMA_SHOW),
}
"""What a tenant may read besides /v1/models/NAME: nothing that tells of other tenants."""
WITHOUT_MODEL = {
    *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/parse_function_call"),
    *("/separate_reasoning", "/v1/messages/count_tokens"),
}
"""Routes that compute nothing with a model."""


class TenantGate:
    """ASGI middleware. `operator_keys` open everything that is not SGLang's to guard."""

    def __init__(
        self,
        app: Any,
        state: tenants.Tenants,
        manager: Callable[[], Any],
        operator_keys: tuple[str, ...],
    ) -> None:
        self.app = app
        self.state = state
        self.manager = manager
        self.operator_keys = operator_keys

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let the request pass with its caller set, or answer it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.state.start(self.manager())
        is_open = scope["path"] in OPEN or what_it_does(scope) is Does.SHOWS
        if is_open or scope["method"] == "OPTIONS":
            tenants.set_caller(None)
            await self.app(scope, receive, send)
            return
        key = key_of(Headers(scope=scope))
        if key is not None and is_one_of(key, self.operator_keys):
            tenants.set_caller(tenants.Caller(None))
            await self.app(scope, receive, send)
            return
        tenant = None if key is None else self.state.table.owner(key)
        if tenant is None:
            what = "no API key" if key is None else "an unknown API key"
            headers = {"WWW-Authenticate": "Bearer"}
            refusal = error(401, f"The request has {what}.", "authentication_error", headers)
            await refusal(scope, receive, send)
            return
        await self.serve(tenant, scope, receive, send)

    async def serve(self, tenant: str, scope: Message, receive: Receive, send: Send) -> None:
        """A request of a tenant."""
        tenants.set_caller(tenants.Caller(tenant))
        does, path = what_it_does(scope), scope["path"]
        if does is Does.READS:
            refusal = None if _may_read(path) else error(403, "This route needs the admin key.")
        elif does is not Does.SERVES:
            refusal = error(403, "This route needs the admin key.")
        else:
            body = await _read(receive)
            receive = _replay(body, receive)
            refusal = self.by_name(path, body) if scope["method"] in ("POST", "PUT") else None
            refusal = refusal or self.by_rate(tenant)
        await (refusal or self.app)(scope, receive, send)

    def by_rate(self, tenant: str) -> JSONResponse | None:
        """429 when the tenant has used its rates."""
        wait = self.state.meter.admit(tenant)
        if wait == 0:
            return None
        message = f"This API key has used its rate; try again in {wait:.1f} s."
        return error(429, message, "rate_limit_error", {"Retry-After": retry_after(wait)})

    def by_name(self, path: str, body: bytes) -> JSONResponse | None:
        """403 when the body names what the tenant may not use."""
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            return None  # another content type, or nonsense: its handler says so
        if not isinstance(content, dict) or path in WITHOUT_MODEL:
            return None
        for spellings in wanted(content, base_names(self.manager())):
            if not any(map(tenants.may_use, spellings)):
                return error(403, tenants.forbidden(spellings[0]))
        return None


def wanted(content: dict[str, Any], base: set[str]) -> Iterator[tuple[str | None, ...]]:
    """What a body asks for: for each name its spellings, of which one suffices; None is the base.

    `model` decides before the other fields unless it means the base model, as in `names`.
    """
    model = content.get("model")
    if isinstance(model, str) and model not in base and model not in ANY_MODEL:
        tail = model.partition(":")[2].strip()
        yield (model, tail) if tail else (model,)
        return
    places = [content, content.get("parameters")]  # the second is Vertex's
    named = False
    for place in places:
        if not isinstance(place, dict):
            continue
        for field in ("lora_path", "lora_name"):
            value = place.get(field)
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str) and name:
                    named = True
                    yield (name,)
                elif isinstance(value, list):
                    yield (None,)
    if not named:
        yield (None,)


def key_of(headers: Headers) -> str | None:
    """The key of `Authorization: Bearer KEY`, or of `X-Api-Key: KEY` where there is no other."""
    given = headers.get("authorization")
    if given is None:
        return headers.get("x-api-key")
    kind, _, key = given.partition(" ")
    return key.strip() if kind.lower() == "bearer" and key.strip() else None


def is_one_of(key: str, keys: tuple[str, ...]) -> bool:
    """Whether `key` is one of `keys`, compared in constant time."""
    given = key.encode(errors="surrogatepass")
    return any([hmac.compare_digest(given, known.encode()) for known in keys])


def error(
    status: int,
    message: str,
    kind: str = "permission_error",
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """An error as the clients of OpenAI and Anthropic read it."""
    content = {"message": message, "type": kind, "code": status, "param": None}
    return JSONResponse({"type": "error", "error": content}, status_code=status, headers=headers)


def _may_read(path: str) -> bool:
    return path in TENANTS_READ or path.startswith("/v1/models/")


async def _read(receive: Receive) -> bytes:
    """The whole body; what came of it before the client left."""
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
