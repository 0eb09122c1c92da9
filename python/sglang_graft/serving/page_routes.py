"""The page at `/graft`: static files of this package.

Target (0.5.17): `utils.auth.decide_request_auth`. Reason: with --api-key SGLang asks for a header
on every path, which a browser cannot send for the page that asks for the key. These files are the
same on every server and hold nothing of it; what the page shows comes from `/graft/overview`, which
asks for the key.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any

from fastapi import APIRouter, HTTPException
from fastapi.responses import Response
from sglang.srt.utils.auth import AuthDecision

from sglang_graft.engine.hooks import Hook

PAGE = "/graft"
FILES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "model.js": "text/javascript; charset=utf-8",
    "draw.js": "text/javascript; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
OPEN = frozenset({PAGE, *(f"{PAGE}/page/{name}" for name in FILES)})
# Only our own files run, and only our own server is asked.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(prefix=PAGE)


def _file(name: str) -> Response:
    body = resources.files("sglang_graft.serving").joinpath("page", name).read_bytes()
    return Response(body, media_type=FILES[name], headers=_HEADERS)


@router.get("", response_class=Response)
async def page() -> Response:
    """The page itself."""
    return _file("index.html")


@router.get("/page/{name}", response_class=Response)
async def file(name: str) -> Response:
    """A file of the page."""
    if name not in FILES:
        raise HTTPException(404, f"No file {name!r} belongs to the page.")
    return _file(name)


def decide(original: Callable[..., AuthDecision], **asked: Any) -> AuthDecision:
    """AROUND `decide_request_auth`, all of whose arguments are keywords."""
    if asked["path"] in OPEN and asked["method"] in ("GET", "HEAD"):
        return AuthDecision(allowed=True)
    return original(**asked)


HOOKS = (
    Hook(
        target="sglang.srt.utils.auth.decide_request_auth",
        kind="around",
        function=decide,
        parameters=(
            "method",
            "path",
            "authorization_header",
            "api_key",
            "admin_api_key",
            "auth_level",
        ),
        reason="the page that asks for the key needs none",
    ),
)
