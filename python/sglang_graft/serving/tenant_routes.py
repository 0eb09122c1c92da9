"""/graft/tenants, and tenants at the start of the HTTP server.

Target (0.5.17): BEFORE `http_server._setup_and_run_http_server`. Reason: SGLang warms its server up
over HTTP with its one API key; with tenants there is none, so it gets one that lives as long as the
process and is nowhere written.
"""

import copy
import secrets
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query
from pydantic import BaseModel, ConfigDict
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_graft.engine.hooks import Hook
from sglang_graft.serving import tenant_change, tenants
from sglang_graft.serving.control import ask
from sglang_graft.serving.tenant_gate import TenantGate

router = APIRouter(prefix="/graft", tags=["graft"])
_own_key: list[str] = []


class Undo(BaseModel):
    """Body of POST /graft/tenants/undo: the number that the change had."""

    model_config = ConfigDict(extra="forbid")

    changes: int


def _manager() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager


@router.get("/tenants")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def report() -> dict[str, Any]:
    """The tenants file as it is used, and what each tenant holds of the pool."""
    state = tenants.current()
    if state is None:
        return {"file": None, "error": None, "changes": 0, "tenants": {}}
    found = state.report()
    held = await ask(_manager(), "tenants")
    for name, row in found["tenants"].items():
        row["pages"] = held["tenants"].get(name)
    return found | {"common_pages": held["common"], "floors_broken": held["floors_broken"]}


@router.put("/tenants")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def put(
    body: dict[str, Any],
    dry_run: Annotated[bool, Query(description="Only say what would change.")] = False,
) -> dict[str, Any]:
    """Write the tenants file anew and take it over, or neither; what a file holds is the body."""
    try:
        return await tenant_change.put(_manager(), body, dry_run=dry_run)
    except tenant_change.ChangeError as error:
        raise HTTPException(status_code=error.status_code, detail=str(error)) from None


@router.post("/tenants/undo")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def undo(body: Undo) -> dict[str, Any]:
    """Go back to what was before the last PUT, if nothing has changed since."""
    try:
        return await tenant_change.undo(_manager(), body.changes)
    except tenant_change.ChangeError as error:
        raise HTTPException(status_code=error.status_code, detail=str(error)) from None


def add_gate(app: Any, server_args: Any, manager: Callable[[], Any]) -> None:
    """Put the gate around everything that was added before."""
    state = tenants.current()
    if state is not None:
        keys = (server_args.admin_api_key, _key())
        app.add_middleware(TenantGate, state=state, manager=manager, operator_keys=keys)


def give_warmup_a_key(
    server_args: Any,
    tokenizer_manager: Any,
    template_manager: Any,
    port_args: Any,
    scheduler_infos: Any,
    subprocess_watchdog: Any,
    execute_warmup_func: Callable[..., Any] | None = None,
    launch_callback: Any = None,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """BEFORE `_setup_and_run_http_server`."""
    if tenants.current() is None:
        return None
    from sglang.srt.entrypoints import http_server

    warm_up = execute_warmup_func or http_server._execute_server_warmup

    def with_key(args: Any) -> Any:
        own = copy.copy(args)
        object.__setattr__(own, "api_key", _key())
        return warm_up(own)

    given = (server_args, tokenizer_manager, template_manager, port_args, scheduler_infos)
    named = {"execute_warmup_func": with_key, "launch_callback": launch_callback}
    return (*given, subprocess_watchdog), named


def _key() -> str:
    if not _own_key:
        _own_key.append(secrets.token_urlsafe(32))
    return _own_key[0]


HOOKS = (
    Hook(
        target="sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        kind="before",
        function=give_warmup_a_key,
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
        reason="the server's own warm-up has a key",
    ),
)
