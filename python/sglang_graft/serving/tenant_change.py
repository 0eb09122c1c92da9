"""Tenants that come by a request instead of an editor: `graft sync` sends them.

The file of --graft-tenants stays the one place where they are kept: it is written anew, beside the
old one and then renamed, so that a restart finds the same state. The scheduler checks floors and
caps first, and everything happens or nothing. The state before the last change is kept in memory,
with the old file's own bytes, so that it can be taken back.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import yaml

from sglang_graft.serving import tenants
from sglang_graft.serving.control import RefusedOperationError, ask
from sglang_graft.serving.tenants import Tenants, limits, signature
from sglang_graft.tenants import MAX_BYTES, Tenant, TenantsError, check, parse

_BAD_REQUEST, _CONFLICT = 400, 409


class ChangeError(Exception):
    """The tenants stay as they were."""

    def __init__(self, message: str, status_code: int = _CONFLICT) -> None:
        super().__init__(message)
        self.status_code = status_code


@dataclass(frozen=True)
class Before:
    """What a change can be taken back to."""

    changes: int
    """The number of the change."""
    content: bytes | None
    """Of the file; None: there was none."""
    tenants: Mapping[str, Tenant]


_before: WeakKeyDictionary[Tenants, Before] = WeakKeyDictionary()


async def put(manager: Any, body: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
    """Take over the tenants of `body`, which is what a tenants file holds. ChangeError.

    The answer names those that differ; keys are never in it.
    """
    state = _state()
    try:
        new = check(body)
    except TenantsError as error:
        raise ChangeError(str(error), _BAD_REQUEST) from None
    # A caller that gives up must not leave the scheduler and the file with different states.
    return await asyncio.shield(_put(state, manager, body, new, dry_run))


async def undo(manager: Any, changes: int) -> dict[str, Any]:
    """Take back change number `changes`, which has to be the last one. ChangeError."""
    return await asyncio.shield(_undo(_state(), manager, changes))


def _state() -> Tenants:
    state = tenants.current()
    if state is None:
        raise ChangeError("This server has no tenants file: start it with --graft-tenants FILE.")
    return state


async def _put(
    state: Tenants, manager: Any, body: dict[str, Any], new: dict[str, Tenant], dry_run: bool
) -> dict[str, Any]:
    async with state.changing:
        await state.look_now(manager)
        found = _difference(state.table.tenants, new)
        same = state.error is None and not any(found.values())
        target = state.path.resolve()
        if dry_run:
            await asyncio.to_thread(_check_writable, target)
            await _tell(manager, new, dry_run=True)
        elif not same:
            content = _content(body, target)
            old, tenants_before = await asyncio.to_thread(_bytes, target), state.table.tenants
            await _take(state, manager, content, new)
            _before[state] = Before(state.changes, old, tenants_before)
        return {"changes": state.changes, "same": same, **found}


async def _undo(state: Tenants, manager: Any, changes: int) -> dict[str, Any]:
    async with state.changing:
        await state.look_now(manager)
        before = _before.get(state)
        if before is None or before.changes != changes or state.changes != changes:
            raise ChangeError(
                f"Change {changes} cannot be taken back: the last one is {state.changes}, and only"
                " one that came by PUT /graft/tenants, as the last, and since the server's start"
            )
        found = _difference(state.table.tenants, before.tenants)
        await _take(state, manager, before.content, before.tenants)
        del _before[state]
        return {"changes": state.changes, "same": False, **found}


def _difference(old: Mapping[str, Tenant], new: Mapping[str, Tenant]) -> dict[str, list[str]]:
    return {
        "added": [name for name in new if name not in old],
        "changed": [name for name in new if name in old and new[name] != old[name]],
        "removed": [name for name in old if name not in new],
    }


async def _take(
    state: Tenants, manager: Any, content: bytes | None, new: Mapping[str, Tenant]
) -> None:
    """Write the file beside the old one, tell the scheduler, put the file in its place."""
    target = state.path.resolve()
    hidden = await asyncio.to_thread(_write_beside, target, content)
    try:
        await _tell(manager, new)
        try:
            await asyncio.to_thread(_put_in_place, hidden, target)
        except OSError as error:
            await _tell(manager, state.table.tenants)
            raise _cannot_write(target, error) from None
    finally:
        if hidden is not None:
            hidden.unlink(missing_ok=True)
    state.take(new, await asyncio.to_thread(signature, state.path))


async def _tell(manager: Any, new: Mapping[str, Tenant], *, dry_run: bool = False) -> None:
    try:
        await ask(manager, "set_tenants", tenants=limits(new), dry_run=dry_run)
    except RefusedOperationError as error:
        raise ChangeError(str(error)) from None


def _content(body: dict[str, Any], target: Path) -> bytes:
    """`body` as a file's text, in the language that the file's name says."""
    if target.suffix == ".json":
        text = json.dumps(body, indent=2, ensure_ascii=False) + "\n"
    else:
        text = yaml.safe_dump(body, sort_keys=False, allow_unicode=True)
    content = text.encode()
    if len(content) > MAX_BYTES:
        raise ChangeError(f"wanted at most {MAX_BYTES} bytes, got {len(content)}", _BAD_REQUEST)
    try:
        read_back: dict[str, Tenant] | None = parse(text, str(target))
    except TenantsError:
        read_back = None
    if read_back != check(body):
        raise ChangeError(f"some names have characters that {target} cannot hold", _BAD_REQUEST)
    return content


def _bytes(target: Path) -> bytes | None:
    try:
        return target.read_bytes()
    except OSError:
        return None


def _check_writable(target: Path) -> None:
    """A file is replaced, so its folder has to be one where files can be made."""
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ChangeError(f"{target}: the server may not write in its folder")


def _write_beside(target: Path, content: bytes | None) -> Path | None:
    """A hidden file with `content` and the permissions of the one that it will replace."""
    if content is None:
        return None
    hidden = None
    try:
        number, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        hidden = Path(name)
        with os.fdopen(number, "wb") as opened:
            opened.write(content)
            if target.exists():
                os.fchmod(number, target.stat().st_mode & 0o777)
            opened.flush()
            os.fsync(number)
    except OSError as error:
        if hidden is not None:
            hidden.unlink(missing_ok=True)
        raise _cannot_write(target, error) from None
    return hidden


def _put_in_place(hidden: Path | None, target: Path) -> None:
    if hidden is None:
        target.unlink(missing_ok=True)
    else:
        hidden.replace(target)


def _cannot_write(target: Path, error: OSError) -> ChangeError:
    return ChangeError(f"{target} cannot be written: {error.strerror}")
