"""Tenants that come by PUT: file, scheduler and this process change together or not at all."""

import asyncio
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_graft.serving import tenant_change, tenants
from sglang_graft.serving.control import RefusedOperationError
from sglang_graft.serving.tenant_change import ChangeError, put, undo
from sglang_graft.serving.tenants import Tenants
from sglang_graft.tenants import make_key, parse, read

KEY, HASH = make_key()
OLD = f"# by hand\ntenants:\n  acme: {{keys: [{HASH}], adapters: [legal]}}\n"


class Scheduler:
    """What was told, and limits on floors."""

    def __init__(self) -> None:
        self.limits: dict[str, Any] = {}
        self.asked = 0

    async def ask(self, manager: Any, operation: str, **arguments: Any) -> dict[str, Any]:
        assert operation == "set_tenants"
        self.asked += 1
        wanted = arguments["tenants"]
        if any(row["page_floor"] == 9 for row in wanted.values()):
            raise RefusedOperationError("page_floor: all floors together are 9")
        if not arguments.get("dry_run"):
            self.limits = wanted
        return {}


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    made = Scheduler()
    monkeypatch.setattr(tenants, "ask", made.ask)
    monkeypatch.setattr(tenant_change, "ask", made.ask)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "tenants.yaml"
    found.write_text(OLD)
    found.chmod(0o640)
    return found


@pytest.fixture
def state(path: Path) -> Iterator[Tenants]:
    made = Tenants(path, read(path))
    tenants.set_current(made)
    yield made
    tenants.set_current(None)


def tenant(**fields: Any) -> dict[str, Any]:
    return {"keys": [HASH], **fields}


def do(wanted: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
    return asyncio.run(put(None, {"tenants": wanted}, dry_run=dry_run))


def refused(call: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(ChangeError) as error:
        call()
    return error.value.status_code, str(error.value)


def agree(state: Tenants, scheduler: Scheduler) -> None:
    """The file, the scheduler and this process say the same, and nothing else lies about."""
    assert read(state.path) == state.table.tenants
    assert scheduler.limits == tenants.limits(state.table.tenants)
    assert [file.name for file in state.path.parent.iterdir()] == [state.path.name]


def test_a_change_is_written_and_used(state: Tenants, scheduler: Scheduler, path: Path) -> None:
    found = do({"acme": tenant(page_floor="25%"), "new": {"keys": [make_key()[1]]}})
    assert found == {
        "changes": 1,
        "same": False,
        "added": ["new"],
        "changed": ["acme"],
        "removed": [],
    }
    assert scheduler.limits["acme"]["page_floor"] == 0.25
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    agree(state, scheduler)
    asked = scheduler.asked
    asyncio.run(state.look(None))
    assert (scheduler.asked, state.changes) == (asked, 1), "its own file is no change"
    assert do({"acme": tenant(page_floor="25%"), "new": dump(state, "new")})["same"]
    assert state.changes == 1


def dump(state: Tenants, name: str) -> dict[str, Any]:
    return {"keys": list(state.table.tenants[name].keys)}


def test_a_dry_run_only_says_it(state: Tenants, scheduler: Scheduler, path: Path) -> None:
    found = do({"acme": tenant(), "b": {"keys": [make_key()[1]]}}, dry_run=True)
    assert (found["added"], found["changed"], found["changes"]) == (["b"], ["acme"], 0)
    assert path.read_text() == OLD
    agree(state, scheduler)
    assert refused(lambda: do({"acme": tenant(page_floor=9)}, dry_run=True))[0] == 409


def test_an_undo_brings_the_files_own_bytes_back(
    state: Tenants, scheduler: Scheduler, path: Path
) -> None:
    do({"b": tenant()})
    assert refused(lambda: asyncio.run(undo(None, 0)))[0] == 409
    assert asyncio.run(undo(None, 1))["added"] == ["acme"]
    assert path.read_text() == OLD
    agree(state, scheduler)
    assert refused(lambda: asyncio.run(undo(None, 1)))[0] == 409, "once"


def test_what_somebody_else_wrote_since_is_not_undone(
    state: Tenants, scheduler: Scheduler, path: Path
) -> None:
    do({"b": tenant()})
    path.write_text(OLD)
    status, message = refused(lambda: asyncio.run(undo(None, 1)))
    assert (status, path.read_text()) == (409, OLD)
    assert "the last one is 2" in message
    agree(state, scheduler)


def test_a_file_that_cannot_be_used_is_written_anew(
    state: Tenants, scheduler: Scheduler, path: Path
) -> None:
    wanted = {"acme": tenant(adapters=["legal"])}
    assert do(wanted)["same"]
    for broken in ("tenants: [", None):
        if broken is None:
            path.unlink()
        else:
            path.write_text(broken)
        assert not do(wanted, dry_run=True)["same"]
        assert not do(wanted)["same"]
        assert state.error is None
        agree(state, scheduler)


def test_nothing_changes_when_it_is_refused(
    state: Tenants, scheduler: Scheduler, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert do({"acme": tenant(adapters=["legal"])})["same"]  # the scheduler was told once
    status, message = refused(lambda: do({"acme": {"keys": [KEY]}}))
    assert (status, KEY in message) == (400, False)
    assert message.startswith("tenant acme: keys: entry 1")
    assert refused(lambda: do({"acme": tenant(page_floor=9)})) == (
        409,
        "page_floor: all floors together are 9",
    )
    agree(state, scheduler)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tenant_change.os, "fsync", fail)
        status, message = refused(lambda: do({"b": tenant()}))
        assert (status, message) == (409, f"{path} cannot be written: No space left on device")
    agree(state, scheduler)
    with monkeypatch.context() as patch:
        patch.setattr(tenant_change, "_put_in_place", fail)
        assert refused(lambda: do({"b": tenant()}))[0] == 409
    assert path.read_text() == OLD
    agree(state, scheduler)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        refusal = refused(lambda: do({"b": tenant()}, dry_run=True))
        assert refusal == (409, f"{path}: the server may not write in its folder")


def test_a_link_to_the_file_stays_a_link(tmp_path: Path, scheduler: Scheduler, path: Path) -> None:
    link = tmp_path / "links" / "tenants.yaml"
    link.parent.mkdir()
    link.symlink_to(path)
    state = Tenants(link, read(link))
    tenants.set_current(state)
    do({"b": tenant()})
    assert link.is_symlink()
    assert set(read(path)) == {"b"}
    tenants.set_current(None)


def test_without_a_file_there_is_nothing_to_change() -> None:
    assert refused(lambda: do({}))[0] == 409
    assert "--graft-tenants" in refused(lambda: asyncio.run(undo(None, 1)))[1]


@settings(max_examples=200, deadline=None)
@given(
    globs=st.lists(st.text(min_size=1, max_size=20), max_size=3),
    suffix=st.sampled_from([".yaml", ".json", ""]),
    base=st.booleans(),
)
def test_a_written_file_says_what_was_asked_or_it_is_refused(
    globs: list[str], suffix: str, base: bool
) -> None:
    body = {"tenants": {"acme": tenant(adapters=globs, base=base)}}
    target = Path(f"tenants{suffix}")
    plain = all(letter.isascii() and letter.isprintable() for glob in globs for letter in glob)
    try:
        content = tenant_change._content(body, target)
    except ChangeError:
        assert not plain
        return
    assert parse(content.decode(), "t")["acme"].adapters == tuple(globs)
    loaded = json.loads(content) if suffix == ".json" else yaml.safe_load(content)
    assert loaded == body
