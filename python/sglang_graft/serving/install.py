"""Hooks of the HTTP process, installed once `--enable-graft` is known."""

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_graft.engine.hooks import register, verify
from sglang_graft.serving import (
    drain,
    load,
    load_paths,
    names,
    registry,
    request_checks,
    request_id,
    request_log,
    route_table,
    routes,
    unload,
)

HOOKS = (
    *registry.HOOKS,
    *names.HOOKS,
    *request_checks.HOOKS,
    *route_table.HOOKS,
    *routes.HOOKS,
    *load.HOOKS,
    *load_paths.HOOKS,
    *unload.HOOKS,
    *request_id.HOOKS,
    *request_log.HOOKS,
    *drain.HOOKS,
)
_installed: list[bool] = []


def install() -> None:
    """Register, apply and verify the hooks; the second call does nothing."""
    if not _installed:
        register(HOOKS)
        HookRegistry.apply_hooks()
        _installed.append(True)
    verify(HOOKS)
