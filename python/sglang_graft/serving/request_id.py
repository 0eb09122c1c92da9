"""The id under which a client, a proxy and our log know a request: the header X-Request-Id.

Seam (0.5.17): the FastAPI application, and AFTER `TokenizerManager._init_req_state`. Reasons:
SGLang reads no such header and sends none; its own ids must be unique, and one HTTP request may
have several of them, so a client's id cannot take their place.
"""

import re
import uuid
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, MutableHeaders

from sglang_graft.engine.hooks import Hook

HEADER = "x-request-id"
ATTRIBUTE = "graft_request_id"
"""Of a request's state in the tokenizer manager."""

_GOOD = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_current: ContextVar[str | None] = ContextVar("graft_request_id", default=None)


def accepted(header: str | None) -> str:
    """A client's id, or one of ours when there is none that may stand in a log."""
    return header if header and _GOOD.fullmatch(header) else uuid.uuid4().hex


def current() -> str | None:
    """The id of the HTTP request under way."""
    return _current.get()


class RequestId:
    """ASGI middleware: each answer carries the id of its request."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Set the id for what the request starts, and put it into the answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = accepted(Headers(scope=scope).get(HEADER))

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        token = _current.set(request_id)
        try:
            await self.app(scope, receive, answer)
        finally:
            _current.reset(token)


def note(
    result: dict[str, object], self: Any, obj: Any, request: Any = None, lifecycle_id: Any = None
) -> None:
    """AFTER `_init_req_state`: each state that was made knows the id."""
    request_id = _current.get()
    if request_id is not None:
        for rid in result:
            setattr(self.rid_to_state[rid], ATTRIBUTE, request_id)


HOOKS = (
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state",
        kind="after",
        function=note,
        parameters=("self", "obj", "request", "lifecycle_id"),
        reason="the request log knows the client's id of a request",
    ),
)
