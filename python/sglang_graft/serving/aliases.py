"""Aliases: other names under which requests reach an adapter, switched in one step.

An alias leads to a name, and only this process knows it: the scheduler never sees one. A request
takes the adapter's id in the moment in which its alias is looked up (`names.resolve_native`), so
one that is under way at a switch ends on the adapter that it began with.
"""

from collections.abc import Mapping
from typing import Any

from sglang_graft.adapters.folder_names import given_problem
from sglang_graft.serving.adapter_store import base_names, on_demand

_ATTRIBUTE = "_graft_aliases"


class Aliases:
    """Which name each alias leads to. All changes of one `change` happen at once."""

    def __init__(self) -> None:
        self.table: dict[str, str] = {}

    def resolve(self, name: Any) -> Any:
        """What `name`, or each of a list of names, leads to; other names stay as they are."""
        if isinstance(name, list):
            return [self.table.get(one, one) for one in name]
        return self.table.get(name, name)

    def of(self, adapter: str) -> list[str]:
        """The aliases that lead to an adapter, sorted."""
        return sorted(alias for alias, name in self.table.items() if name == adapter)

    def change(self, changes: Mapping[str, str | None]) -> None:
        """Let aliases lead elsewhere; None takes one away. In one step."""
        table = {**self.table, **changes}
        self.table = {alias: name for alias, name in table.items() if name is not None}

    def check_invariants(self) -> None:
        """Assert that no alias leads to another one."""
        both = self.table.keys() & set(self.table.values())
        assert not both, f"{sorted(both)} are aliases, and aliases lead to them"


def aliases(manager: Any) -> Aliases:
    """The aliases of this server; the same object for every call."""
    made: Aliases | None = getattr(manager, _ATTRIBUTE, None)
    if made is None:
        made = Aliases()
        setattr(manager, _ATTRIBUTE, made)
    return made


def taken(manager: Any, name: str) -> str | None:
    """Why an adapter may not be loaded under this name: an alias has it."""
    target = aliases(manager).table.get(name)
    if target is None:
        return None
    return f"adapter name {name!r}: it is an alias of {target!r}; choose another name"


async def change(manager: Any, changes: Mapping[str, str | None]) -> str | None:
    """Make all of these changes at once, or none and say why.

    Loads wait meanwhile, so that no adapter takes a name that becomes an alias.
    """
    async with manager.lora_registry.load_lock:
        reason = await problem(manager, changes)
        if reason is None:
            aliases(manager).change(changes)
        return reason


async def problem(manager: Any, changes: Mapping[str, str | None]) -> str | None:
    """Why these changes cannot be made, or None."""
    table = aliases(manager).table
    for alias, target in changes.items():
        if target is None:
            if alias not in table:
                return f"alias {alias!r}: there is none"
            continue
        if (reason := await _bad_name(manager, alias)) is not None:
            return f"alias {alias!r}: {reason}"
        if target in table or target in changes:
            return f"alias {alias!r}: {target!r} is an alias; wanted the name of an adapter"
        folders = on_demand(manager)
        if target not in manager.lora_ref_cache and not await folders.exists(target):
            return f"alias {alias!r}: no adapter {target!r} is loaded or below --graft-adapter-root"
    return None


async def _bad_name(manager: Any, alias: str) -> str | None:
    bad = given_problem(alias, base_names(manager))
    if bad is not None:
        return bad
    if alias in manager.lora_ref_cache:
        return "an adapter of that name is loaded"
    if await on_demand(manager).exists(alias):
        return "a folder below --graft-adapter-root has that name"
    return None


def led_to(manager: Any, name: str) -> str | None:
    """Why a client may not unload an adapter: requests for an alias would find nothing."""
    leading = aliases(manager).of(name)
    if not leading:
        return None
    return (
        f"adapter {name}: {', '.join(map(repr, leading))} leads to it; switch or delete that alias"
        " first"
    )
