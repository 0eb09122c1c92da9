"""Control of adapters by `graft adapters` and by `graft sync`, on one real server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapter_root
import pytest
import tiny_model
import yaml
from control_world import (
    KEY,
    ROOT_NAME,
    RUN,
    SHORT,
    as_json,
    clean,
    controlled,
    folders_below,
    graft,
    load,
    row,
    save_root,
    send,
)
from documents import blocks, run_as_written
from harness import Request, Server, environment, wait_until
from lifecycle import Stream
from reference import Reference, check

from sglang_graft.cli.app import app
from sglang_graft.cli.control_client import ControlClient
from sglang_graft.cli.sync_file import read_file
from sglang_graft.cli.sync_plan import make_plan

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_root(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def folders(root: Path) -> dict[str, Path]:
    return folders_below(root)


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path]) -> Reference:
    return Reference(tiny_model.new_model(), folders)


@pytest.fixture(scope="module")
def server(
    base_model: Path, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with controlled(base_model, root, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(autouse=True)
def _clean(server: Server) -> Iterator[None]:
    """Every test ends without aliases, adapters, requests, and with every page free."""
    yield
    clean(server)


# ---- commands


def test_the_commands_do_what_the_routes_do(server: Server, folders: dict[str, Path]) -> None:
    line = ["load", "a", str(folders["v0"]), "--priority", "2", "--ttl", "60", "--json"]
    assert as_json(graft(server, "adapters", *line))["adapter"]["priority"] == 2
    assert as_json(graft(server, "adapters", "pin", "a", "--json"))["adapter"]["pinned"]
    assert not as_json(graft(server, "adapters", "unpin", "a", "--json"))["adapter"]["pinned"]
    warmed = as_json(graft(server, "adapters", "warm", "a", "--json"))
    assert warmed["warm"]["done"]
    assert warmed["adapter"]["state"] == "device"
    changed = as_json(graft(server, "adapters", "set", "a", "--no-ttl", "--json"))
    assert changed["adapter"]["ttl_seconds"] is None
    listed = as_json(graft(server, "adapters", "ls", "--json"))
    assert [one["name"] for one in listed["adapters"]] == ["a"]
    table = graft(server, "adapters", "ls")
    assert "device" in table.stdout
    assert ROOT_NAME in table.stdout
    why = as_json(graft(server, "adapters", "why", "b", str(folders["v1"]), "--json"))
    assert why["fits"]
    assert "forecast for a" in graft(server, "adapters", "why", "a").stdout
    again = graft(server, "adapters", "load", "a", str(folders["v1"]))
    assert again.exit_code == 1
    assert "--replace" not in again.output
    assert "already" in again.output
    replaced = graft(server, "adapters", "load", "a", str(folders["v1"]), "--replace")
    assert replaced.exit_code == 0, replaced.output
    assert graft(server, "adapters", "load", ROOT_NAME, "--warm", "host").exit_code == 0
    assert "would unload a" in graft(server, "adapters", "unload", "a", "--dry-run").stdout
    assert "unloaded a" in graft(server, "adapters", "unload", "a").stdout
    missing = graft(server, "adapters", "pin", "a")
    assert missing.exit_code == 1
    assert "No adapter named 'a'" in missing.output


def test_commands_say_what_is_wrong(server: Server, folders: dict[str, Path]) -> None:
    locked = RUN.invoke(app, ["adapters", "ls", "--url", server.url])
    assert locked.exit_code == 1
    assert "GRAFT_ADMIN_KEY" in locked.output
    opened = RUN.invoke(
        app, ["adapters", "ls"], env={"GRAFT_ADMIN_KEY": KEY, "GRAFT_URL": server.url}
    )
    assert opened.exit_code == 0
    nobody = RUN.invoke(app, ["adapters", "ls", "--url", "http://127.0.0.1:9"])
    assert nobody.exit_code == 3
    assert "--enable-graft" in nobody.output
    assert graft(server, "adapters", "set", "a").exit_code == 2


# ---- desired state


def write(file: Path, **content: Any) -> Path:
    # In one step, as an editor does it: a watcher never sees half a file.
    part = file.with_suffix(".part")
    part.write_text(yaml.safe_dump(content))
    part.rename(file)
    return file


def state(server: Server) -> tuple[dict[str, str], dict[str, tuple[str, bool, int]]]:
    """Aliases, and (folder, pinned, priority) of every adapter."""
    listing = send(server, "GET", "/graft/adapters")
    rows = {
        one["name"]: (Path(one["path"]).name, one["pinned"], one["priority"])
        for one in listing["adapters"]
    }
    return listing["aliases"], rows


def plan_of(result: Any) -> list[str]:
    """The first word of each step."""
    return [step.split()[0] for step in json.loads(result.stdout)["plan"]]


def test_sync_applies_the_difference_once(
    server: Server, folders: dict[str, Path], tmp_path: Path, truth: Reference
) -> None:
    load(server, "other", folders["v5"])
    v0, v1 = str(folders["v0"]), str(folders["v1"])
    adapters: dict[str, Any] = {"one": {"path": v0, "pinned": True, "warmup": ["w1 w2"]}}
    adapters["two"] = {"path": v1, "priority": 1, "warm": "device"}
    adapters[ROOT_NAME] = None
    file = write(tmp_path / "a.yaml", adapters=adapters, aliases={"line": "one"})
    before = state(server)
    dry = graft(server, "sync", str(file), "--dry-run", "--json")
    assert plan_of(dry) == ["load", "load", "load", "switch"]
    assert state(server) == before, "a dry run changes nothing"
    shown = graft(server, "sync", str(file))
    assert shown.exit_code == 0, shown.output
    assert "plan: load one" in shown.stdout
    wanted = {"one": ("v0", True, 0), "two": ("v1", False, 1), "other": ("v5", False, 0)}
    assert state(server) == ({"line": "one"}, wanted | {ROOT_NAME: ("legal", False, 0)})
    assert row(server, "two")["state"] == "device"
    again = graft(server, "sync", str(file), "--json")
    assert (again.exit_code, plan_of(again)) == (0, [])
    # Other weights, other settings, another target; what the file does not name stays.
    adapters["one"] = {"path": str(folders["v2"]), "warmup": [{"text": "w3", "max_tokens": 2}]}
    adapters["two"]["pinned"] = True
    write(file, adapters=adapters, aliases={"line": "two", "more": "one"})
    changed = graft(server, "sync", str(file), "--json")
    assert changed.exit_code == 0, changed.output
    assert plan_of(changed) == ["replace", "change", "switch"]
    wanted |= {"one": ("v2", False, 0), "two": ("v1", True, 1)}
    aliases = {"line": "two", "more": "one"}
    assert state(server) == (aliases, wanted | {ROOT_NAME: ("legal", False, 0)})
    check(truth, [Request("v2", SHORT)], [server.ask(Request("more", SHORT))])
    assert plan_of(graft(server, "sync", str(file), "--json")) == []
    del adapters["two"]
    write(file, adapters=adapters, aliases={"more": "one"})
    assert plan_of(graft(server, "sync", str(file), "--json")) == []
    pruned = graft(server, "sync", str(file), "--prune", "--json")
    assert plan_of(pruned) == ["switch", "unload", "unload"]
    assert set(state(server)[1]) == {"one", ROOT_NAME}


def test_a_wrong_file_or_folder_changes_nothing(
    server: Server, folders: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("adapters:\n  one:\n    path: x\n    pined: true\n")
    wrong = graft(server, "sync", str(file))
    assert wrong.exit_code == 2
    assert "a.yaml, line 4: adapters.one.pined" in wrong.output
    adapters = {"one": {"path": str(folders["v0"])}, "bad": {"path": "/etc"}}
    write(file, adapters=adapters, aliases={"line": "one", "more": "nobody"})
    result = graft(server, "sync", str(file))
    assert result.exit_code == 1
    assert "refused: bad:" in result.output
    assert "no adapter 'nobody'" in result.output
    assert state(server) == ({}, {})


def test_tenants_need_a_tenants_file(
    server: Server, folders: dict[str, Path], tmp_path: Path
) -> None:
    adapters = {"one": {"path": str(folders["v0"])}}
    file = write(tmp_path / "a.yaml", adapters=adapters, tenants={})
    result = graft(server, "sync", str(file))
    assert result.exit_code == 1
    assert "refused: tenants: This server has no tenants file" in result.output
    assert state(server) == ({}, {})


def test_a_failure_takes_everything_back(
    server: Server, folders: dict[str, Path], tmp_path: Path, truth: Reference
) -> None:
    load(server, "one", folders["v0"], pinned=True, priority=2)
    load(server, "two", folders["v1"])
    send(server, "PUT", "/graft/aliases/line", {"adapter": "one"})
    before = state(server)
    failing = {"text": "w1 " * (tiny_model.CONTEXT + 10)}
    unpinned = {"path": str(folders["v0"]), "priority": 1}
    good = {"path": str(folders["v2"]), "warmup": ["w5"]}
    running = Stream(server, Request("line", SHORT, 400)).started()
    for bad in (
        {"path": str(folders["v3"]), "warmup": ["w1", failing]},  # its warm-up
        {"path": str(folders["v3"]), "pinned": True},  # no room beside the other pins
    ):
        adapters: dict[str, Any] = {"one": unpinned, "new": good, "bad": bad}
        if bad.get("pinned"):
            adapters |= {f"pin{n}": bad | {"path": str(folders[f"v{n}"])} for n in range(8)}
        file = write(tmp_path / "a.yaml", adapters=adapters, aliases={"line": "new"})
        result = graft(server, "sync", str(file))
        assert result.exit_code == 1, result.output
        assert "all is as it was before" in result.output
        assert state(server) == before
    # The same for a replacement, whose old weights never stop to serve, and for its stage.
    adapters = {"two": {"path": str(folders["v3"]), "warmup": [failing]}}
    file = write(tmp_path / "a.yaml", adapters=adapters, aliases={"line": "two"})
    result = graft(server, "sync", str(file))
    assert result.exit_code == 1
    assert "warm-up" in result.output
    assert state(server) == before
    check(truth, [Request("v1", SHORT)], [server.ask(Request("two", SHORT))])
    # And for a loaded adapter that an alias should lead to.
    adapters = {"two": {"path": str(folders["v1"]), "warmup": [failing]}}
    file = write(tmp_path / "a.yaml", adapters=adapters, aliases={"line": "two"})
    assert graft(server, "sync", str(file)).exit_code == 1
    assert state(server) == before
    check(truth, [Request("v0", SHORT, 400)], [running.result()])


def test_a_late_failure_restores_what_was_replaced(
    server: Server, folders: dict[str, Path], tmp_path: Path
) -> None:
    load(server, "one", folders["v0"], priority=2)
    send(server, "PUT", "/graft/aliases/line", {"adapter": "one"})
    before = state(server)
    adapters = {"one": {"path": str(folders["v1"])}}
    file = write(tmp_path / "a.yaml", adapters=adapters, aliases={"next": "one"})
    # Between plan and switch somebody takes the alias' name: the last step fails.
    from sglang_graft.cli.sync_apply import apply

    with ControlClient(server.url, KEY) as client:
        plan = make_plan(client, read_file(file))
        load(server, "next", folders["v5"])
        outcome = apply(client, plan, print)
    assert outcome.error is not None
    assert (outcome.lost, len(outcome.restored)) == ([], 1)
    send(server, "DELETE", "/graft/adapters/next")
    assert state(server) == before


def test_another_way_to_the_same_weights_is_no_difference(
    server: Server, folders: dict[str, Path], root: Path, tmp_path: Path
) -> None:
    load(server, "one", folders["v0"])
    copy = adapter_root.put(root / "made/copy", folders["v0"])
    file = write(tmp_path / "a.yaml", adapters={"one": {"path": str(copy)}})
    assert plan_of(graft(server, "sync", str(file), "--json")) == []
    load(server, "two", copy)
    write(file, adapters={"two": {"path": str(copy)}})
    adapter_root.put(copy, folders["v1"])
    assert plan_of(graft(server, "sync", str(file), "--json")) == []
    assert plan_of(graft(server, "sync", str(file), "--json", "--reread")) == ["replace"]
    (root / "made/copy").rename(root / "made/.copy")


def test_watch_follows_the_file(server: Server, folders: dict[str, Path], tmp_path: Path) -> None:
    adapters = {"one": {"path": str(folders["v0"])}, "two": {"path": str(folders["v1"])}}
    file = write(tmp_path / "a.yaml", adapters=adapters, aliases={"line": "one"})
    line = [sys.executable, "-m", "sglang_graft.cli.app", "sync", str(file), "--watch"]
    line += ["--interval", "0.1", "--url", server.url]
    log = (tmp_path / "log").open("wb")
    env = environment({"GRAFT_ADMIN_KEY": KEY})
    process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env=env)
    try:
        wait_until(lambda: send(server, "GET", "/graft/aliases") == {"line": "one"})
        file.write_text("aliases: [")
        wait_until(lambda: b"a.yaml, line" in (tmp_path / "log").read_bytes())
        assert process.poll() is None, "a wrong file does not end the watch"
        write(file, adapters=adapters, aliases={"line": "two"})
        wait_until(lambda: send(server, "GET", "/graft/aliases") == {"line": "two"})
    finally:
        process.terminate()
        assert process.wait(60) == 0
        log.close()
    assert b"Traceback" not in (tmp_path / "log").read_bytes()


def test_the_lines_of_the_documents_run_as_written(
    server: Server, folders: dict[str, Path], root: Path, tmp_path: Path
) -> None:
    (file,) = blocks("docs/control.md", "yaml")
    # Below the root, but hidden from it: these folders are loaded by their paths alone.
    here = root / ".documents"
    for name, version in (("legal-v2", "v0"), ("legal-v3", "v1"), ("sales", "v2")):
        adapter_root.put(here / name, folders[version])
    (here / "adapters.yaml").write_text(file)
    lines = "".join(blocks("docs/control.md"))
    printed = run_as_written(server, lines, tmp_path, GRAFT_ADMIN_KEY=KEY, ADAPTERS=str(here))
    assert printed.endswith("nothing to do\n")
    assert send(server, "GET", "/graft/aliases") == {"legal": "legal-v3"}
    assert row(server, "legal-v3")["pinned"]
