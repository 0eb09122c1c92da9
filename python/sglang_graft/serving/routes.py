"""Graft's HTTP routes.

Target (0.5.17): BEFORE `http_server._setup_and_run_http_server`. Reason: SGLang's application
exists then and has not started to serve.
"""

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from sglang.srt.utils.auth import AuthLevel, auth_level
from sglang.srt.utils.msgspec_utils import msgspec_to_builtins

from sglang_graft import config
from sglang_graft.engine.hooks import Hook
from sglang_graft.serving import (
    adapter_routes,
    metrics_routes,
    names,
    page_routes,
    tenant_routes,
    vllm_routes,
)
from sglang_graft.serving.control import ask
from sglang_graft.serving.load_input import LoadInput
from sglang_graft.serving.registry import in_flight

router = APIRouter(prefix="/graft", tags=["graft"])
LOAD_PATH = "/load_lora_adapter"

ROUTERS = (
    router,
    vllm_routes.router,
    metrics_routes.router,
    page_routes.router,
    tenant_routes.router,
    adapter_routes.router,
)
"""All routes that Graft adds."""


@router.get("/pool")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def pool() -> dict[str, Any]:
    """The pool report of the scheduler: pages by owner, and every adapter."""
    from sglang.srt.entrypoints import http_server

    return await ask(http_server._global_state.tokenizer_manager, "pool")


@router.get("/requests")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def requests() -> dict[str, Any]:
    """Requests under way: all, by adapter name, and of adapters that have lost their name."""
    from sglang.srt.entrypoints import http_server

    manager = http_server._global_state.tokenizer_manager
    registry, counts = manager.lora_registry, in_flight(manager)
    named = {name: counts[ref.lora_id] for name, ref in registry.get_all_adapters().items()}
    gone = [
        {"name": ref.lora_name, "id": i, "requests": counts[i]}
        for i, ref in registry.retired.items()
    ]
    return {"total": len(manager.rid_to_state), "adapters": named, "retired": gone}


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def load_lora_adapter(obj: Annotated[LoadInput, Body()], request: Request) -> JSONResponse:
    """Load an adapter, or replace one in place. SGLang's route, with `load_inplace` in the body."""
    from sglang.srt.entrypoints import http_server

    result = await http_server._global_state.tokenizer_manager.load_lora_adapter(obj, request)
    status = HTTPStatus.OK if result.success else HTTPStatus.BAD_REQUEST
    return JSONResponse(msgspec_to_builtins(result), status_code=status)


def replace_route(app: Any) -> None:
    """Put our route in the place of SGLang's."""
    routes = app.router.routes
    (place,) = [i for i, stock in enumerate(routes) if getattr(stock, "path", None) == LOAD_PATH]
    # SGLang's body drops fields that it does not know.
    routes[place] = APIRoute(LOAD_PATH, load_lora_adapter, methods=["POST"])


def add_routes(
    server_args: Any, tokenizer_manager: Any, template_manager: Any, *others: Any, **more: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """BEFORE `_setup_and_run_http_server`. ValueError for adapters that nobody could use."""
    from sglang.srt.entrypoints import http_server

    from sglang_graft.serving import (
        bad_input,
        chat_templates,
        client_routes,
        listing,
        production_routes,
        tokenized_checks,
    )
    from sglang_graft.serving.guard import ModelGuard

    base = {server_args.served_model_name, server_args.model_path}
    for ref in server_args.lora_paths or []:
        if (reason := names.reserved(ref.lora_name, base)) is not None:
            raise ValueError(reason)
        templates = chat_templates.read(ref.lora_path)  # nobody waits for this process yet
        if templates is not None:
            tokenizer_manager.lora_registry.templates[ref.lora_id] = templates
    names.serve_over_http()
    tokenized_checks.serve_over_http()
    replace_route(http_server.app)
    client_routes.replace_routes(http_server.app)
    for ours in ROUTERS:
        http_server.app.include_router(ours)
    listing.add_to(http_server.app)
    http_server.app.add_middleware(bad_input.BodyErrors)
    http_server.app.add_middleware(
        ModelGuard, manager=lambda: http_server._global_state.tokenizer_manager
    )
    # After these, so that it is around them: nothing looks at a request before its key was seen.
    tenant_routes.add_gate(
        http_server.app, server_args, lambda: http_server._global_state.tokenizer_manager
    )
    options = config.published() or config.GraftConfig()
    production_routes.add_to(http_server.app, tokenizer_manager, options, server_args.lora_paths)
    templates = chat_templates.RequestTemplates(template_manager)
    return (server_args, tokenizer_manager, templates, *others), more


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
