"""Hooks of the HTTP process, installed once `--enable-graft` is known."""

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_graft.engine.hooks import register, verify
from sglang_graft.serving import (
    bad_input,
    chat_templates,
    load,
    load_paths,
    names,
    ollama,
    page_routes,
    registry,
    reply,
    request_checks,
    request_metrics,
    route_table,
    routes,
    tokenized_checks,
    unload,
)

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
    *load.HOOKS,
    *load_paths.HOOKS,
    *unload.HOOKS,
    *request_metrics.HOOKS,
    *page_routes.HOOKS,
)
_installed: list[bool] = []


def install() -> None:
    """Register, apply and verify the hooks; the second call does nothing."""
    if not _installed:
        register(HOOKS)
        HookRegistry.apply_hooks()
        _installed.append(True)
    verify(HOOKS)
