"""What a hook is, how hooks are registered with SGLang, and how each one is proved to be live.

SGLang (0.5.17, plugins/__init__.py and plugins/hook_registry.py) logs a plugin or hook that fails
and then starts without it. So nothing here trusts registration: `verify` looks at the patched
attribute itself, and whoever needs a hook calls it at start.
"""

import inspect
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_graft import SGLANG_VERSION


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One change to one attribute of SGLang."""

    target: str
    """Dotted path of the function, method or class."""
    kind: Literal["before", "after", "around", "replace"]
    function: Any
    """Our function, or our class for `replace`."""
    parameters: tuple[str, ...]
    """Parameter names that the target has in the pinned release."""
    reason: str


class HookError(RuntimeError):
    """A hook that Graft cannot work without is missing, or its target has changed."""


def register(hooks: Iterable[Hook]) -> None:
    """Register `hooks` with SGLang; its `load_plugins` applies them right afterwards."""
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def chain(target: Any) -> list[Any]:
    """A patched attribute and all that it wraps, outermost first."""
    found = [target]
    while not isinstance(target, type) and hasattr(target, "__wrapped__"):
        target = target.__wrapped__
        found.append(target)
    return found


def _is_live(hook: Hook, attribute: Any) -> bool:
    if hook.kind == "replace":
        return attribute is hook.function
    cells = [
        c.cell_contents for f in chain(attribute) for c in getattr(f, "__closure__", None) or ()
    ]
    return any(content is hook.function for content in cells)


def _original_parameters(hook: Hook, attribute: Any) -> tuple[str, ...]:
    if hook.kind == "replace":
        # Our subclass stands there; what it replaced is its base.
        attribute = hook.function.__mro__[1]
    return tuple(inspect.signature(chain(attribute)[-1]).parameters)


def problem(hook: Hook, *, live: bool = True) -> str | None:
    """Why `hook` cannot be relied upon, or None. `live=False` checks only its target."""
    try:
        attribute = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError) as error:
        return f"{hook.target}: not found ({error})"
    got = _original_parameters(hook, attribute)
    if got != hook.parameters:
        return f"{hook.target}: wanted parameters {hook.parameters}, got {got}"
    if live and not _is_live(hook, attribute):
        return f"{hook.target}: the hook is not live (purpose: {hook.reason})"
    return None


def verify(hooks: Iterable[Hook]) -> None:
    """Raise HookError that lists every hook that is not live or whose target has changed."""
    found = [text for hook in hooks if (text := problem(hook)) is not None]
    if found:
        raise HookError(
            "Graft refuses to start, because SGLang would serve without it:\n  "
            + "\n  ".join(found)
            + f"\nGraft needs sglang=={SGLANG_VERSION}; run `graft doctor`, and look for other"
            " plugins in SGLANG_PLUGINS that change the same functions."
        )
