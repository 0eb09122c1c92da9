"""The difference between what a file wants and what a server has, as steps."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_graft.cli.control_client import ControlClient, ServerError
from sglang_graft.cli.sync_file import Desired, Prompt, WantedAdapter

STAGE = ".graft-sync"
"""Behind the name of an adapter that is replaced: where its successor is warmed up."""

SETTINGS = ("pinned", "ttl_seconds", "priority")


@dataclass(frozen=True)
class Load:
    """A new adapter, or new weights for a loaded one (`replaces`)."""

    name: str
    body: dict[str, Any]
    prompts: tuple[Prompt, ...]
    replaces: bool
    forecast: dict[str, Any]

    def __str__(self) -> str:
        what = "replace" if self.replaces else "load"
        source = self.body["path"] or "its folder below the adapter root"
        settings = ", ".join(f"{key} {self.body[key]}" for key in SETTINGS if self.body[key])
        ready = f", {len(self.prompts)} warm-up prompts" if self.prompts else ""
        warm = f", warm on the {self.body['warm']}" if self.body.get("warm") else ""
        return f"{what} {self.name} from {source}{', ' if settings else ''}{settings}{warm}{ready}"


@dataclass(frozen=True)
class Change:
    """Settings of an adapter that is loaded as wanted."""

    name: str
    body: dict[str, Any]

    def __str__(self) -> str:
        settings = ", ".join(f"{key} {value}" for key, value in self.body.items())
        return f"change {self.name}: {settings}"


@dataclass(frozen=True)
class WarmUp:
    """Prompts of a loaded adapter to which an alias is about to lead."""

    name: str
    prompts: tuple[Prompt, ...]

    def __str__(self) -> str:
        return f"warm up {self.name} with {len(self.prompts)} prompts"


@dataclass(frozen=True)
class Switch:
    """All aliases that change, in one step; None takes one away."""

    changes: dict[str, str | None]
    before: dict[str, str]

    def __str__(self) -> str:
        rows = [
            f"{alias}: {self.before.get(alias, 'nothing')} -> {target or 'nothing'}"
            for alias, target in self.changes.items()
        ]
        return "switch aliases " + ", ".join(rows)


@dataclass(frozen=True)
class Unload:
    """An adapter that the file does not name, with --prune."""

    name: str

    def __str__(self) -> str:
        return f"unload {self.name}"


@dataclass(frozen=True)
class SetTenants:
    """All tenants of the file. `changes`: how often the server's had changed before."""

    wanted: dict[str, Any] = field(repr=False)
    difference: dict[str, list[str]]
    changes: int

    def __str__(self) -> str:
        rows = [f"{what} {', '.join(names)}" for what, names in self.difference.items() if names]
        return "tenants: " + ("; ".join(rows) or "write the file, which cannot be used, anew")


Step = Load | Change | WarmUp | Switch | SetTenants | Unload


@dataclass(frozen=True)
class Plan:
    """Steps in their order, and `before`: the server's listing that they start from."""

    steps: list[Step] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)


def make_plan(
    client: ControlClient, desired: Desired, *, prune: bool = False, reread: bool = False
) -> Plan:
    """Compare; nothing on the server changes. Raises ServerError when it cannot be asked.

    Folders are read and checked by the server for all that would be loaded. `reread` also compares
    the weights of those whose path has stayed the same.
    """
    before = client.adapters()
    rows = {row["name"]: row for row in before["adapters"]}
    plan = Plan(before=before)
    loads: list[Load] = []
    for name, wanted in desired.adapters.items():
        try:
            found = _load(client, name, wanted, rows.get(name), reread)
        except ServerError as error:
            if error.status_code is None:
                raise
            plan.refusals.append(f"{name}: {error}")
            continue
        if found is not None:
            loads.append(found)
    new = {load.name for load in loads}
    changes = _changes(desired, rows, new)
    switch = _switch(desired, before["aliases"], prune)
    plan.refusals.extend(_unreachable(desired, rows, before))
    tenants = _tenants(client, desired, plan.refusals)
    # What gives up a pin comes first: what takes one may need its room.
    plan.steps.extend([change for change in changes if change.body.get("pinned") is False])
    plan.steps.extend(loads)
    plan.steps.extend([change for change in changes if change.body.get("pinned") is not False])
    if switch.changes:
        plan.steps.extend(_warm_ups(desired, switch, new))
        plan.steps.append(switch)
    if tenants is not None:
        plan.steps.append(tenants)
    if prune:
        plan.steps.extend(_unloads(desired, rows))
    return plan


def _load(
    client: ControlClient,
    name: str,
    wanted: WantedAdapter,
    row: Mapping[str, Any] | None,
    reread: bool,
) -> Load | None:
    """The load that `wanted` needs, None for none."""
    if row is not None:
        same = wanted.path is None or wanted.path == row["path"]
        if same and not (reread and wanted.path is not None):
            return None
    body = {"name": name, "path": wanted.path, "load_inplace": row is not None}
    body |= wanted.settings() | ({"warm": wanted.warm} if wanted.warm else {})
    forecast = client.load(body, dry_run=True)
    if row is not None and forecast["identity"] == row["identity"]:
        return None  # another way to the same weights
    return Load(name, body, tuple(wanted.warmup), row is not None, forecast)


def _changes(desired: Desired, rows: Mapping[str, Any], new: Collection[str]) -> list[Change]:
    found = []
    for name, wanted in desired.adapters.items():
        if name in rows and name not in new:
            settings = wanted.settings()
            body = {key: settings[key] for key in SETTINGS if settings[key] != rows[name][key]}
            if body:
                found.append(Change(name, body))
    return found


def _switch(desired: Desired, before: dict[str, str], prune: bool) -> Switch:
    changes: dict[str, str | None] = {
        alias: target for alias, target in desired.aliases.items() if before.get(alias) != target
    }
    if prune:
        changes |= {alias: None for alias in before if alias not in desired.aliases}
    return Switch(changes, before)


def _warm_ups(desired: Desired, switch: Switch, new: Collection[str]) -> list[WarmUp]:
    """For targets that are loaded already; a load runs its own prompts."""
    targets = dict.fromkeys(target for target in switch.changes.values() if target)
    return [
        WarmUp(name, tuple(desired.adapters[name].warmup))
        for name in targets
        if name in desired.adapters and name not in new and desired.adapters[name].warmup
    ]


def _tenants(client: ControlClient, desired: Desired, refusals: list[str]) -> SetTenants | None:
    """The change of tenants that the server would take, None for none."""
    if desired.tenants is None:
        return None
    try:
        found = client.put_tenants(desired.tenants, dry_run=True)
    except ServerError as error:
        if error.status_code is None:
            raise
        refusals.append(f"tenants: {error}")
        return None
    if found["same"]:
        return None
    difference = {what: found[what] for what in ("added", "changed", "removed")}
    return SetTenants(desired.tenants, difference, found["changes"])


def _unloads(desired: Desired, rows: Mapping[str, Any]) -> list[Unload]:
    """Adapters that nobody wants. Those below a root are not the file's to unload."""
    unwanted = [name for name in rows if name not in desired.adapters]
    kept = set(desired.aliases.values())
    return [Unload(name) for name in unwanted if name not in kept and not rows[name]["below_root"]]


def _unreachable(desired: Desired, rows: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    known = {*rows, *desired.adapters, *(folder["name"] for folder in before["available"])}
    return [
        f"alias {alias}: no adapter {target!r} in the file or on the server"
        for alias, target in desired.aliases.items()
        if target not in known
    ]
