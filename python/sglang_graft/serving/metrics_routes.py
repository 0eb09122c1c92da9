"""`/metrics`, and what the page at `/graft` is drawn from.

Seam (0.5.17): the FastAPI application. With --enable-metrics SGLang mounts its own `/metrics` when
the application starts, which is after our route: ours is found first, and has SGLang's metrics in
the same exposition. They are read from the files of prometheus_client's multiprocess mode, as
SGLang's own mount reads them.

prometheus_client decides at its first import whether it writes such files, by an environment
variable that SGLang sets while it starts. So it is imported in the handler, never before.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_graft import SGLANG_VERSION, __version__, config
from sglang_graft.serving.control import ask
from sglang_graft.serving.metrics_table import Source
from sglang_graft.serving.request_metrics import counts
from sglang_graft.serving.snapshots import Latest, Snapshots

SHOWN_ADAPTERS, SHOWN_CHILDREN = 64, 6
OVERVIEW_REUSE_SECONDS = 0.5
"""Many open pages are one question to the scheduler."""

router = APIRouter()
_open: dict[str, Snapshots] = {}


def _manager() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager


def _snapshots(operation: str, reuse: float, **arguments: Any) -> Snapshots:
    if operation not in _open:
        _open[operation] = Snapshots(lambda: ask(_manager(), operation, **arguments), reuse=reuse)
    return _open[operation]


def http_part(latest: Latest, in_flight: int) -> dict[str, Any]:
    """What this process knows, in the words of `metrics_table`."""
    options = config.published()
    return {
        **counts().report(),
        "in_flight": in_flight,
        "stale": int(latest.stale),
        "age": latest.age,
        "version": __version__,
        "sglang_version": SGLANG_VERSION,
        "policy": "" if options is None else options.policy,
    }


def _render(parts: dict[Source, Any], accept: str, with_sglang: bool) -> tuple[bytes, str]:
    from prometheus_client import multiprocess

    from sglang_graft.serving import exposition

    # prometheus_client leaves this constructor untyped.
    collector: Any = multiprocess.MultiProcessCollector
    others = [collector(None)] if with_sglang else []
    return exposition.render(parts, accept, others)


@router.get("/metrics", response_class=Response)
@router.get("/metrics/", response_class=Response, include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Prometheus metrics of Graft, and SGLang's own with --enable-metrics."""
    manager = _manager()
    latest = await _snapshots("metrics", 0.0).latest()
    parts = {
        Source.SCHEDULER: latest.data,
        Source.HTTP: http_part(latest, len(manager.rid_to_state)),
    }
    accept, with_sglang = request.headers.get("accept", ""), manager.server_args.enable_metrics
    # In a thread, because it reads files when SGLang's metrics are on.
    body, kind = await asyncio.to_thread(_render, parts, accept, with_sglang)
    return Response(body, headers={"Content-Type": kind})


@router.get("/graft/overview")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def overview() -> dict[str, Any]:
    """The pool as a picture: adapters used last, the first KV below them, what left last, and
    requests by adapter. No text and no token of any request."""
    manager = _manager()
    latest = await _snapshots(
        "overview", OVERVIEW_REUSE_SECONDS, adapters=SHOWN_ADAPTERS, children=SHOWN_CHILDREN
    ).latest()
    part = http_part(latest, len(manager.rid_to_state))
    errors = [
        {"adapter": label, "reason": reason, "count": count}
        for (label, reason), count in part["errors"].items()
    ]
    return {
        "model": manager.served_model_name,
        "scheduler": latest.data,
        "http": {**part, "errors": errors},
    }
