"""Carry out a plan, or bring the server back to what it had."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sglang_graft.cli.control_client import ControlClient, ServerError
from sglang_graft.cli.sync_file import Prompt
from sglang_graft.cli.sync_plan import (
    SETTINGS,
    STAGE,
    Change,
    Load,
    Plan,
    SetTenants,
    Step,
    Switch,
    Unload,
    WarmUp,
)

_NOT_FOUND = 404
Attempt = Callable[[str, Callable[[], object]], None]
"""Take a step of the way back, and note whether it could be taken."""


@dataclass
class Outcome:
    """What came of a plan. `error` is None when all of it was done.

    After an error `restored` says what was put back, and `lost` what could not be.
    """

    done: list[str] = field(default_factory=list)
    error: str | None = None
    restored: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def apply(client: ControlClient, plan: Plan, tell: Callable[[str], None]) -> Outcome:
    """Take the steps in order; at the first that fails, go back to `plan.before`."""
    outcome = Outcome()
    try:
        for step in plan.steps:
            tell(f"{step} ...")
            _take(client, step)
            outcome.done.append(str(step))
    except (ServerError, KeyboardInterrupt) as error:
        outcome.error = f"{step}: {str(error) or 'interrupted'}"
        tell(f"failed: {outcome.error}")
        _restore(client, plan, outcome, tell)
        if isinstance(error, KeyboardInterrupt):
            raise
    return outcome


def _take(client: ControlClient, step: Step) -> None:
    match step:
        case Load(replaces=True):
            _replace(client, step)
        case Load():
            _load(client, step.body)
            _run_prompts(client, step.name, step.prompts)
        case Change():
            client.change(step.name, step.body)
        case WarmUp():
            _run_prompts(client, step.name, step.prompts)
        case Switch():
            client.switch(step.changes)
        case SetTenants():
            client.put_tenants(step.wanted)
        case Unload():
            client.unload(step.name)


def _replace(client: ControlClient, step: Load) -> None:
    """Warm the new weights up under another name; equal weights share their bytes and KV."""
    stage = step.name + STAGE
    body = {"name": stage, "path": step.body["path"]}
    if step.prompts:
        _load(client, body)
        _run_prompts(client, stage, step.prompts)
    _load(client, step.body)
    if step.prompts:
        client.unload(stage)


def _load(client: ControlClient, body: dict[str, Any]) -> None:
    answer = client.load(body)
    warm = answer.get("warm")
    if warm is not None and not warm["done"]:
        raise ServerError(f"not warm on the {warm['to']}: {warm['reason']}", 409)


def _run_prompts(client: ControlClient, name: str, prompts: Iterable[Prompt]) -> None:
    for prompt in prompts:
        try:
            client.prompt(name, prompt.text, prompt.max_tokens)
        except ServerError as error:
            raise ServerError(f"warm-up {prompt.text!r}: {error}", error.status_code) from None


def _restore(
    client: ControlClient, plan: Plan, outcome: Outcome, tell: Callable[[str], None]
) -> None:
    """Bring back everything that differs from `plan.before`."""

    def attempt(what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except ServerError as error:
            outcome.lost.append(f"{what}: {error}")
            tell(f"rollback failed: {what}: {error}")
        else:
            outcome.restored.append(what)
            tell(f"rollback: {what}")

    steps = [step for step in plan.steps if isinstance(step, SetTenants)]
    try:
        now = client.adapters()
        taken = [step for step in steps if client.tenants()["changes"] != step.changes]
    except ServerError as error:
        outcome.lost.append(str(error))
        tell(f"rollback failed: {error}")
        return
    for step in taken:  # the server refuses when another change came since
        number = step.changes + 1
        attempt("put the tenants back", lambda number=number: client.undo_tenants(number))  # type: ignore[misc]
    _restore_adapters(client, plan, now, attempt)


def _restore_adapters(
    client: ControlClient, plan: Plan, now: dict[str, Any], attempt: Attempt
) -> None:
    """Weights first, then aliases, which need them, then what is too much, then settings."""
    before = {row["name"]: row for row in plan.before["adapters"]}
    rows = {row["name"]: row for row in now["adapters"]}
    touched = _touched(plan)
    for name in (name for name in touched if name in before):
        row, old = rows.get(name), before[name]
        if row is None or row["identity"] != old["identity"]:
            body = _old_load(old, inplace=row is not None)
            attempt(f"load {name} from {old['path']} again", lambda body=body: client.load(body))  # type: ignore[misc]
    aliases = _old_aliases(plan.before["aliases"], now["aliases"])
    if aliases:
        attempt("switch the aliases back", lambda: client.switch(aliases))
    for name in (name for name in touched if name in rows and name not in before):
        attempt(f"unload {name}", lambda name=name: _unload(client, name))  # type: ignore[misc]
    for name in (name for name in touched if name in before and name in rows):
        old, row = before[name], rows[name]
        body = {key: old[key] for key in SETTINGS if old[key] != row[key]}
        if body and row["identity"] == old["identity"]:
            attempt(f"change {name} back", lambda n=name, b=body: client.change(n, b))  # type: ignore[misc]


def _touched(plan: Plan) -> list[str]:
    names = []
    for step in plan.steps:
        if isinstance(step, Load):
            names += [step.name, step.name + STAGE]
        elif isinstance(step, Change | Unload):
            names.append(step.name)
    return list(dict.fromkeys(names))


def _old_load(old: dict[str, Any], *, inplace: bool) -> dict[str, Any]:
    body = {"name": old["name"], "path": old["path"], "load_inplace": inplace}
    return body | {key: old[key] for key in SETTINGS}


def _old_aliases(before: dict[str, str], now: dict[str, str]) -> dict[str, str | None]:
    names = sorted(before.keys() | now.keys())
    return {name: before.get(name) for name in names if before.get(name) != now.get(name)}


def _unload(client: ControlClient, name: str) -> None:
    try:
        client.unload(name)
    except ServerError as error:
        if error.status_code != _NOT_FOUND:
            raise
