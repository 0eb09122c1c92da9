"""Graft's HTTP routes.

Target (0.5.17): BEFORE `http_server._setup_and_run_http_server`. Reason: SGLang's application
exists then and has not started to serve.
"""

from typing import Any

from fastapi import APIRouter, HTTPException
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_graft.engine.hooks import Hook
from sglang_graft.serving import names
from sglang_graft.serving.guard import ModelGuard

router = APIRouter(prefix="/graft", tags=["graft"])


@router.get("/pool")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def pool() -> dict[str, Any]:
    """The pool report of the scheduler: pages by owner, and every adapter."""
    from sglang.srt.entrypoints import http_server

    states = await http_server._global_state.tokenizer_manager.get_internal_state()
    report = states[0].get("graft")
    if report is None:
        raise HTTPException(status_code=503, detail="the scheduler sent no Graft report")
    assert isinstance(report, dict), f"the report is a {type(report).__name__}"
    return report


def add_routes(server_args: Any, *_: Any, **__: Any) -> None:
    """BEFORE `_setup_and_run_http_server`."""
    from sglang.srt.entrypoints import http_server

    from sglang_graft.serving import listing

    names.serve_over_http()
    http_server.app.include_router(router)
    listing.add_to(http_server.app)
    http_server.app.add_middleware(
        ModelGuard, manager=lambda: http_server._global_state.tokenizer_manager
    )


HOOKS = (
    Hook(
        target="sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        kind="before",
        function=add_routes,
        parameters=(
            "server_args",
            "tokenizer_manager",
            "template_manager",
            "port_args",
            "scheduler_infos",
            "subprocess_watchdog",
            "execute_warmup_func",
            "launch_callback",
        ),
        reason="the routes under /graft",
    ),
)
