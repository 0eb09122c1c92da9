"""`graft sync` against a server in memory: plans, their order, and the way back."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_server import ControlServer
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_graft.cli import sync
from sglang_graft.cli.control_client import ControlClient
from sglang_graft.cli.sync import Options, run
from sglang_graft.cli.sync_apply import apply
from sglang_graft.cli.sync_file import Desired
from sglang_graft.cli.sync_plan import make_plan


def desired(adapters: dict[str, Any], aliases: dict[str, str] | None = None) -> Desired:
    return Desired.model_validate({"adapters": adapters, "aliases": aliases or {}})


def done(server: ControlServer, wanted: Desired, **options: bool) -> list[str]:
    """The changes that a plan made, which must succeed."""
    with server.client() as client:
        outcome = apply(client, make_plan(client, wanted, **options), print)
    assert outcome.error is None
    calls, server.calls = server.calls, []
    return calls


WANTED = desired(
    {"a": {"path": "/a", "warmup": ["x"]}, "b": {"path": "/b", "priority": 1}}, {"line": "a"}
)


def test_loads_and_warms_before_it_switches() -> None:
    server = ControlServer()
    assert done(server, WANTED) == [
        "POST /graft/adapters",
        "POST /generate",
        "POST /graft/adapters",
        "PATCH /graft/aliases",
    ]
    assert server.adapters["b"]["priority"] == 1
    assert server.aliases == {"line": "a"}
    assert done(server, WANTED) == [], "the second time there is nothing to do"


def test_a_replacement_is_warmed_up_under_another_name() -> None:
    server = ControlServer()
    server.add("a", "/old", priority=1)
    server.add("b", "/old")
    wanted = {"a": {"path": "/new", "warmup": ["x"]}, "b": {"path": "/new"}}
    assert done(server, desired(wanted)) == [
        "POST /graft/adapters",
        "POST /generate",
        "POST /graft/adapters",
        "DELETE /graft/adapters/a.graft-sync",
        "POST /graft/adapters",
    ]
    assert {name: row["path"] for name, row in server.adapters.items()} == {
        "a": "/new",
        "b": "/new",
    }
    assert server.adapters["a"]["priority"] == 0, "what the file does not say is the default"


def test_a_pin_is_given_up_before_another_one_is_taken() -> None:
    server = ControlServer()
    server.add("old", "/old", pinned=True)
    server.add("up", "/up")
    wanted = {"new": {"path": "/new", "pinned": True}, "old": {"path": "/old"}}
    wanted["up"] = {"path": "/up", "pinned": True}
    assert done(server, desired(wanted)) == [
        "PATCH /graft/adapters/old",
        "POST /graft/adapters",
        "PATCH /graft/adapters/up",
    ]


def test_what_the_file_does_not_name_goes_only_with_prune() -> None:
    server = ControlServer()
    server.add("mine", "/m")
    server.add("other", "/o")
    server.add("team/x", "/root/team/x", below_root=True)
    server.aliases = {"line": "mine", "stale": "other"}
    wanted = desired({"mine": {"path": "/m"}}, {"line": "mine"})
    assert done(server, wanted) == []
    assert done(server, wanted, prune=True) == [
        "PATCH /graft/aliases",
        "DELETE /graft/adapters/other",
    ]
    assert server.aliases == {"line": "mine"}
    assert set(server.adapters) == {"mine", "team/x"}


def test_a_warm_up_of_what_is_loaded_runs_before_an_alias_leads_there() -> None:
    server = ControlServer()
    server.add("a", "/a")
    server.add("b", "/b")
    wanted = desired({"a": {"path": "/a", "warmup": ["x", "y"]}}, {"line": "a", "more": "b"})
    assert done(server, wanted) == ["POST /generate"] * 2 + ["PATCH /graft/aliases"]


def test_refusals_are_told_before_anything_changes() -> None:
    server = ControlServer()
    wanted = desired({"a": {"path": "/a"}, "b": {"path": "/is/bad"}}, {"line": "nobody"})
    with server.client() as client:
        plan = make_plan(client, wanted)
    assert [refusal.split(":")[0] for refusal in plan.refusals] == ["b", "alias line"]
    assert server.calls == []


PLACES = st.sampled_from(
    ["warm-up", "no room", "alias", "load", "change", "unload", "tenants", "nothing"]
)


@settings(max_examples=60, deadline=None)
@given(place=PLACES, names=st.sets(st.sampled_from("abcd"), min_size=1), prune=st.booleans())
def test_whatever_fails_the_server_has_what_it_had(
    place: str, names: set[str], prune: bool
) -> None:
    server = ControlServer()
    server.add("a", "/a", pinned=True, priority=2)
    server.add("b", "/b-old", ttl_seconds=5)
    server.add("z", "/z", priority=1)
    server.aliases = {"line": "a", "stale": "z"}
    adapters: dict[str, Any] = {
        name: {"path": f"/{name}", "warm": "host"} for name in sorted(names)
    }
    if place == "warm-up":
        adapters |= {name: one | {"warmup": ["x", "fail"]} for name, one in adapters.items()}
    if place == "no room":
        server.cold = names
    failing = {
        "alias": ("PATCH", "/graft/aliases"),
        "change": ("PATCH", "/graft/adapters/a"),
        "unload": ("DELETE", "/graft/adapters/z"),
        "load": ("POST", "/graft/adapters"),
        "tenants": ("PUT", "/graft/tenants"),
    }
    before = server.state()
    with server.client() as client:
        wanted = desired(adapters, {"line": min(names), "more": max(names)})
        wanted = wanted.model_copy(update={"tenants": {"t": {}}})
        plan = make_plan(client, wanted, prune=prune)
        if place in failing:
            server.fails[failing[place]] = 409
        said: list[str] = []
        outcome = apply(client, plan, said.append)
    if outcome.error is None:
        assert place not in ("alias", "tenants")
        assert server.tenants == {"t": {}}
        return
    assert server.tenants == {}
    if place == "alias":
        # The one step that fails is also the way back; then nothing was switched.
        assert outcome.lost == []
    assert server.state() == before, said
    assert outcome.lost == []


def test_what_could_not_be_put_back_is_said(tmp_path: Path, capsys: Any) -> None:
    server = ControlServer()
    file = tmp_path / "a.yaml"
    file.write_text("adapters:\n  a: {path: /a, warmup: [fail]}\n")
    server.fails["DELETE", "/graft/adapters/a"] = 500
    options = Options(dry_run=False, prune=False, reread=False, as_json=True)
    with server.client() as client:
        assert run(client, file, options) == sync.LOST
    said = json.loads(capsys.readouterr().out)
    assert said["lost"] == ["unload a: /graft/adapters/a fails"]
    assert "warm-up 'fail': too long" in said["error"]


@pytest.mark.parametrize("dry_run", [True, False])
def test_exit_codes(tmp_path: Path, dry_run: bool, capsys: Any) -> None:
    server, file = ControlServer(), tmp_path / "a.yaml"
    options = Options(dry_run=dry_run, prune=False, reread=False, as_json=False)
    with server.client() as client:
        assert run(client, file, options) == sync.WRONG_FILE
        file.write_text("adapters:\n  a: {path: /is/bad}\n")
        assert run(client, file, options) == sync.FAILED
        file.write_text("adapters:\n  a: {path: /a}\n")
        assert run(client, file, options) == sync.DONE
    assert server.calls == ([] if dry_run else ["POST /graft/adapters"])
    assert "plan: load a from /a" in capsys.readouterr().out

    def nobody(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with ControlClient("http://server", transport=httpx.MockTransport(nobody)) as client:
        assert run(client, file, options) == sync.NOBODY
    assert "--enable-graft" in capsys.readouterr().err


def test_a_watch_runs_when_the_file_changes(tmp_path: Path, monkeypatch: Any) -> None:
    server, file = ControlServer(), tmp_path / "a.yaml"
    file.write_text("adapters:\n  a: {path: /a}\n")
    options = Options(dry_run=False, prune=False, reread=False, as_json=True)
    looks: list[int] = []

    def sleep(_: float) -> None:
        looks.append(len(server.adapters))
        if len(looks) == 2:
            file.write_text("adapters:\n  a: {path: /a}\n  bb: {path: /b}\n")
        if len(looks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(sync.time, "sleep", sleep)
    with server.client() as client:
        code = run(client, file, options)
        with pytest.raises(KeyboardInterrupt):
            sync._follow(client, file, options, 0.1, code, "first")
    assert looks == [1, 1, 2, 2]
    assert server.calls == ["POST /graft/adapters"] * 2, "an unchanged file is left alone"


def test_a_watch_runs_when_the_server_has_restarted(tmp_path: Path, monkeypatch: Any) -> None:
    server, file = ControlServer(), tmp_path / "a.yaml"
    file.write_text("adapters:\n  a: {path: /a, ttl_seconds: 9, priority: 1}\naliases: {line: a}\n")
    options = Options(dry_run=False, prune=False, reread=False, as_json=True)
    looks: list[bool] = []

    def sleep(_: float) -> None:
        looks.append(server.aliases == {"line": "a"} and server.adapters["a"]["priority"] == 1)
        match len(looks):
            case 2:
                server.restart()
            case 4:  # it is down for a while this time
                server.restart()
                looks_at, server.instance = server.instance, None
                back.append(looks_at)
            case 6:
                server.instance = back.pop()
            case 8:
                raise KeyboardInterrupt

    back: list[str | None] = []
    monkeypatch.setattr(sync.time, "sleep", sleep)
    with server.client() as client:
        assert client.instance() == "first"
        code = run(client, file, options)
        with pytest.raises(KeyboardInterrupt):
            sync._follow(client, file, options, 0.1, code, "first")
    assert looks == [True, True, True, True, False, False, True, True]
    assert len(server.calls) == 3 * 2, "each server was told once"


TENANT = {"keys": [f"sha256:{'0' * 64}"]}


def test_tenants_are_the_last_but_what_goes() -> None:
    server = ControlServer()
    server.add("old", "/old")
    server.tenants = {"gone": TENANT, "same": TENANT, "other": TENANT}
    wanted = desired({"a": {"path": "/a"}}, {"line": "a"}).model_copy(
        update={"tenants": {"new": TENANT, "same": TENANT, "other": TENANT | {"priority": 1}}}
    )
    with server.client() as client:
        steps = make_plan(client, wanted).steps
    assert str(steps[-1]) == "tenants: added new; changed other; removed gone"
    assert done(server, wanted, prune=True) == [
        "POST /graft/adapters",
        "PATCH /graft/aliases",
        "PUT /graft/tenants",
        "DELETE /graft/adapters/old",
    ]
    assert done(server, wanted) == []
    assert done(server, desired({"a": {"path": "/a"}})) == [], "without tenants they are left alone"


def test_tenants_that_the_server_refuses_are_told_before_anything_changes() -> None:
    server = ControlServer()
    wanted = desired({"a": {"path": "/a"}}).model_copy(update={"tenants": {"greedy": TENANT}})
    with server.client() as client:
        assert make_plan(client, wanted).refusals == [
            "tenants: page_floor: all floors together are 9"
        ]
    assert server.calls == []


@pytest.mark.parametrize("others", [0, 1])
def test_tenants_are_put_back_unless_somebody_else_has_changed_them(others: int) -> None:
    server = ControlServer()
    server.add("old", "/old")
    server.tenants = {"a": TENANT}
    wanted = desired({}).model_copy(update={"tenants": {"b": TENANT}})
    server.fails["DELETE", "/graft/adapters/old"] = 409

    def tell(line: str) -> None:
        if line.startswith("unload"):
            server.tenant_changes += others

    with server.client() as client:
        outcome = apply(client, make_plan(client, wanted, prune=True), tell)
    assert outcome.error is not None
    if others:
        assert outcome.lost == ["put the tenants back: cannot be taken back"]
    else:
        assert (server.tenants, outcome.restored) == ({"a": TENANT}, ["put the tenants back"])
        assert outcome.lost == []


def test_an_interrupted_sync_is_taken_back_too() -> None:
    server = ControlServer()

    def tell(line: str) -> None:
        if line.startswith("switch"):
            raise KeyboardInterrupt

    with server.client() as client:
        plan = make_plan(client, WANTED)
        with pytest.raises(KeyboardInterrupt):
            apply(client, plan, tell)
    assert server.state() == ({}, {})
