"""Hooks of the HTTP process, installed once `--enable-graft` is known."""

from pathlib import Path

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_graft.engine.hooks import register, verify
from sglang_graft.serving import (
    bad_input,
    chat_templates,
    drain,
    load,
    load_paths,
    names,
    ollama,
    page_routes,
    registry,
    reply,
    request_checks,
    request_id,
    request_log,
    request_metrics,
    route_table,
    routes,
    tenant_requests,
    tenant_routes,
    tenants,
    tokenized_checks,
    unload,
)
from sglang_graft.tenants import Tenant

HOOKS = (
    *registry.HOOKS,
    *names.HOOKS,
    *chat_templates.HOOKS,
    *reply.HOOKS,
    *request_checks.HOOKS,
    *tokenized_checks.HOOKS,
    *bad_input.HOOKS,
    *ollama.HOOKS,
    *route_table.HOOKS,
    *routes.HOOKS,
    *tenant_requests.HOOKS,
    *tenant_routes.HOOKS,
    *load.HOOKS,
    *load_paths.HOOKS,
    *unload.HOOKS,
    *request_metrics.HOOKS,
    *page_routes.HOOKS,
    *request_id.HOOKS,
    *request_log.HOOKS,
    *drain.HOOKS,
)
_installed: list[bool] = []


def install(with_tenants: tuple[Path, dict[str, Tenant]] | None = None) -> None:
    """Register, apply and verify the hooks, which a second call does not repeat; set the tenants
    of this process, and the file that they are from."""
    tenants.set_current(None if with_tenants is None else tenants.Tenants(*with_tenants))
    if not _installed:
        register(HOOKS)
        HookRegistry.apply_hooks()
        _installed.append(True)
    verify(HOOKS)
