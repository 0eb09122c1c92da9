"""Control of adapters over HTTP, by `graft adapters` and by `graft sync`, on one real server."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import adapter_root
import httpx
import pytest
import tiny_model
import yaml
from documents import blocks, run_as_written
from harness import STRICT, Request, Server, environment, serve, wait_until
from lifecycle import BAD_REQUEST, NOT_FOUND, OK, Stream, answered_by, save_versions
from reference import Reference, check
from typer.testing import CliRunner

from sglang_graft.cli.app import app
from sglang_graft.cli.control_client import ControlClient
from sglang_graft.cli.sync_file import read_file
from sglang_graft.cli.sync_plan import make_plan

pytestmark = pytest.mark.server

CONFLICT, UNAUTHORIZED = 409, 401
KEY = "secret"
POOL_PAGES, PAGE_TOKENS = 80, 16
VERSIONS = [f"v{number}" for number in range(8)]  # 12 pages each
SHORT = tiny_model.prompt(40, seed=5)
ROOT_NAME = "team/legal"
RUN = CliRunner()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below it: `made/v0` to `made/v7` to load from by path, and `team/legal` to load by name."""
    folder = tmp_path_factory.mktemp("root")
    save_versions(folder / "made", VERSIONS)
    adapter_root.put(folder / ROOT_NAME, folder / "made/v7")
    return folder


@pytest.fixture(scope="module")
def folders(root: Path) -> dict[str, Path]:
    return {name: root / "made" / name for name in VERSIONS}


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path]) -> Reference:
    return Reference(tiny_model.new_model(), folders)


@pytest.fixture(scope="module")
def server(
    base_model: Path, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ["--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(POOL_PAGES * PAGE_TOKENS)]
    flags += ["--served-model-name", "base", "--admin-api-key", KEY]
    flags += ["--graft-adapter-root", str(root), "--graft-adapter-scan-seconds", "0.2"]
    with serve(base_model, tmp_path_factory.mktemp("server"), *flags, env=STRICT) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        yield running


@pytest.fixture(autouse=True)
def _clean(server: Server) -> Iterator[None]:
    """Every test ends without aliases, adapters, requests, and with every page free."""
    yield
    server.settle()
    send(server, "PATCH", "/graft/aliases", dict.fromkeys(send(server, "GET", "/graft/aliases")))
    for row in send(server, "GET", "/graft/adapters")["adapters"]:
        send(server, "DELETE", f"/graft/adapters/{row['name']}")
    server.flush()
    pool = server.pool()
    assert pool["pages"]["free"] == pool["pages"]["total"]


def answer(server: Server, method: str, path: str, body: Any = None) -> httpx.Response:
    return server.client.request(method, server.url + path, json=body)


def send(server: Server, method: str, path: str, body: Any = None) -> Any:
    """The JSON of an answer that must be a success."""
    response = answer(server, method, path, body)
    assert response.status_code == OK, response.text
    return response.json()


def refused(server: Server, method: str, path: str, body: Any = None) -> tuple[int, str]:
    response = answer(server, method, path, body)
    assert response.status_code != OK, response.text
    return response.status_code, response.json()["message"]


def load(server: Server, name: str, folder: Path, **more: Any) -> Any:
    body = {"name": name, "path": str(folder), **more}
    return send(server, "POST", "/graft/adapters", body)


def row(server: Server, name: str) -> dict[str, Any]:
    found: dict[str, Any] = send(server, "GET", f"/graft/adapters/{name}")
    return found


def graft(server: Server, *line: str) -> Any:
    """Run a command against the server."""
    return RUN.invoke(app, [*line, "--url", server.url, "--key", KEY])


def as_json(result: Any) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def fill(server: Server, folders: dict[str, Path]) -> None:
    """Adapters a to f with a prompt each: more than the pool holds."""
    for name, version in zip("abcdef", VERSIONS, strict=False):
        load(server, name, folders[version])
        server.ask(Request(name, tiny_model.prompt(50, seed=9), 4))
    server.settle()


# ---- routes of single adapters


def test_a_load_is_listed_with_all_that_is_known(server: Server, folders: dict[str, Path]) -> None:
    made = load(server, "a", folders["v0"], priority=2, ttl_seconds=500)
    assert made["adapter"]["state"] == "host"
    server.ask(Request("a", SHORT))
    server.settle()
    listing = send(server, "GET", "/graft/adapters")
    (one,) = listing["adapters"]
    assert one == row(server, "a") | {"idle_seconds": one["idle_seconds"]}
    assert (one["name"], one["path"]) == ("a", str(folders["v0"]))
    assert (one["state"], one["pinned"], one["priority"]) == ("device", False, 2)
    assert (one["ttl_seconds"], one["aliases"], one["requests"]) == (500, [], 0)
    pool = server.pool()
    assert one["device_bytes"] == one["bytes"] == pool["pages"]["adapter"] * pool["page_bytes"]
    assert one["kv_bytes"] == pool["pages"]["kv_cached"] * pool["page_bytes"] > 0
    names = {folder["name"] for folder in listing["available"]}
    assert names == {ROOT_NAME, *(f"made/{version}" for version in VERSIONS)}


def test_bad_input_is_refused_with_its_reason(server: Server, folders: dict[str, Path]) -> None:
    load(server, "a", folders["v0"])
    here = {"name": "b", "path": str(folders["v1"])}
    assert refused(server, "POST", "/graft/adapters", here | {"name": "a"})[0] == CONFLICT
    bad: list[tuple[str, str, Any, int, str]] = [
        ("POST", "/graft/adapters", here | {"path": "/etc"}, BAD_REQUEST, "outside"),
        ("POST", "/graft/adapters", here | {"name": "base"}, BAD_REQUEST, "base model"),
        ("POST", "/graft/adapters", here | {"ttl_seconds": 0}, BAD_REQUEST, "ttl_seconds"),
        ("POST", "/graft/adapters", here | {"priority": 99}, BAD_REQUEST, "priority"),
        ("POST", "/graft/adapters", here | {"warm": "moon"}, BAD_REQUEST, "warm"),
        ("POST", "/graft/adapters", here | {"pined": True}, BAD_REQUEST, "pined"),
        ("POST", "/graft/adapters", {"name": "no/where"}, NOT_FOUND, "no such folder"),
        ("POST", "/graft/adapters?dry_run=true", here | {"path": "/etc"}, BAD_REQUEST, "outside"),
        ("GET", "/graft/adapters/nobody", None, NOT_FOUND, "nobody"),
        ("PATCH", "/graft/adapters/nobody", {"pinned": True}, NOT_FOUND, "nobody"),
        ("PATCH", "/graft/adapters/a", {"warm": "moon"}, BAD_REQUEST, "warm"),
        ("DELETE", "/graft/adapters/nobody", None, NOT_FOUND, "nobody"),
        ("GET", "/graft/why/nobody", None, NOT_FOUND, "nobody"),
        ("PUT", "/graft/aliases/x", {"adapter": "nobody"}, CONFLICT, "nobody"),
        ("PUT", "/graft/aliases/a", {"adapter": "a"}, CONFLICT, "an adapter of that name"),
        ("PUT", "/graft/aliases/base", {"adapter": "a"}, CONFLICT, "base model"),
        ("PUT", f"/graft/aliases/{ROOT_NAME}", {"adapter": "a"}, CONFLICT, "a folder below"),
        ("DELETE", "/graft/aliases/nobody", None, NOT_FOUND, "nobody"),
    ]
    for method, path, body, status, word in bad:
        code, message = refused(server, method, path, body)
        assert (code, word in message) == (status, True), (method, path, body, message)
    assert [one["name"] for one in send(server, "GET", "/graft/adapters")["adapters"]] == ["a"]


def test_every_route_asks_for_the_admin_key(server: Server) -> None:
    for method, path in (
        ("GET", "/graft/adapters"),
        ("POST", "/graft/adapters"),
        ("PATCH", "/graft/adapters/a"),
        ("DELETE", "/graft/adapters/team/legal"),
        ("GET", "/graft/why/a"),
        ("GET", "/graft/aliases"),
        ("PUT", "/graft/aliases/a"),
    ):
        response = httpx.request(method, server.url + path, json={})
        assert response.status_code == UNAUTHORIZED, (method, path)


def test_an_adapter_below_a_root_comes_back_on_use(server: Server, truth: Reference) -> None:
    send(server, "POST", "/graft/adapters", {"name": ROOT_NAME, "priority": 1, "warm": "device"})
    found = row(server, ROOT_NAME)
    assert (found["state"], found["priority"], found["below_root"]) == ("device", 1, True)
    quoted = quote(ROOT_NAME, safe="")
    assert row(server, quoted)["name"] == ROOT_NAME
    gone = send(server, "DELETE", f"/graft/adapters/{ROOT_NAME}")
    assert gone["loaded_again_on_use"]
    assert refused(server, "GET", f"/graft/adapters/{ROOT_NAME}")[0] == NOT_FOUND
    request = Request(ROOT_NAME, SHORT)
    check(truth, [Request("v7", SHORT)], [server.ask(request)])
    assert row(server, ROOT_NAME)["state"] == "device"


def test_pin_and_unpin_without_a_load(server: Server, folders: dict[str, Path]) -> None:
    fill(server, folders)
    loads = server.adapter("a")["loads"]
    forecast = send(server, "GET", "/graft/why/a?pin=true")
    pinned = send(server, "PATCH", "/graft/adapters/a", {"pinned": True})
    assert forecast["fits"]
    assert forecast["leaves"] == pinned["left"] != []
    wait_until(lambda: row(server, "a")["state"] == "device")
    assert server.adapter("a")["loads"] == loads + 1
    for name in "bcdef":
        server.ask(Request(name, tiny_model.prompt(60, seed=3)))
    assert row(server, "a")["pinned"]
    assert row(server, "a")["state"] == "device"
    # Pinned ones leave room for the largest other adapter, so not all of them can be.
    load(server, "g", folders["v6"])
    codes = [
        answer(server, "PATCH", f"/graft/adapters/{name}", {"pinned": True}).status_code
        for name in "bcdef"
    ]
    assert codes[0] == OK
    assert codes[-1] == CONFLICT
    for name in "abcdef":
        assert not send(server, "PATCH", f"/graft/adapters/{name}", {"pinned": False})["left"]
    assert not any(one["pinned"] for one in send(server, "GET", "/graft/adapters")["adapters"])


def test_a_pin_and_a_priority_outlive_what_they_should(
    server: Server, folders: dict[str, Path]
) -> None:
    load(server, "a", folders["v0"], priority=3, ttl_seconds=100)
    load(server, "a", folders["v1"], load_inplace=True)
    assert (row(server, "a")["priority"], row(server, "a")["ttl_seconds"]) == (3, 100)
    send(server, "DELETE", "/graft/adapters/a")
    load(server, "a", folders["v0"])
    assert (row(server, "a")["priority"], row(server, "a")["ttl_seconds"]) == (0, None)


def test_what_is_foreseen_is_what_leaves(server: Server, folders: dict[str, Path]) -> None:
    fill(server, folders)
    absent = [n for n in "abcdef" if row(server, n)["state"] == "host"]
    assert absent, "the pool holds all of them"
    for name in absent:
        before = {n: row(server, n) for n in "abcdef"}
        forecast = send(server, "GET", f"/graft/why/{name}")
        assert forecast["fits"]
        assert forecast["leaves"], "a full pool has to give something up"
        after = {n: row(server, n) for n in "abcdef"}
        assert [one["state"] for one in after.values()] == [o["state"] for o in before.values()]
        warmed = send(server, "PATCH", f"/graft/adapters/{name}", {"warm": "device"})
        assert warmed["warm"]["done"]
        assert warmed["left"] == forecast["leaves"]
        for gone in forecast["leaves"]:
            (other,) = gone["adapters"]
            now = row(server, other)
            assert before[other]["kv_bytes"] - now["kv_bytes"] == gone["kv_bytes"]
            assert before[other]["device_bytes"] - now["device_bytes"] == gone["bytes"]


def test_what_has_a_priority_stays(server: Server, folders: dict[str, Path]) -> None:
    load(server, "first", folders["v6"], priority=4)
    server.ask(Request("first", tiny_model.prompt(50, seed=9), 4))
    fill(server, folders)
    assert row(server, "first")["state"] == "device", "it was used before all the others"
    send(server, "PATCH", "/graft/adapters/first", {"priority": -4})
    absent = next(n for n in "abcdef" if row(server, n)["state"] == "host")
    leaves = send(server, "GET", f"/graft/why/{absent}")["leaves"]
    assert "first" in {name for one in leaves for name in one["adapters"]}


def test_warm_takes_nothing_from_running_requests(
    server: Server, folders: dict[str, Path], truth: Reference
) -> None:
    load(server, "a", folders["v0"])
    load(server, "b", folders["v1"])
    # 40 + 900 tokens of 1280; the pool fills while it runs.
    running = Stream(server, Request("a", SHORT, 900)).started(880)
    reply = send(server, "PATCH", "/graft/adapters/b", {"warm": "device"})
    forecast = send(server, "GET", "/graft/why/b")
    if running.is_running() and not reply["warm"]["done"]:
        assert not forecast["fits"]
        assert reply["warm"]["missing_bytes"] > 0
    check(truth, [Request("v0", SHORT, 900)], [running.result()])


def test_dry_runs_of_loads_and_unloads(server: Server, folders: dict[str, Path]) -> None:
    here = {"name": "a", "path": str(folders["v0"])}
    said = send(server, "POST", "/graft/adapters?dry_run=true", here)
    assert said["fits"]
    assert said["leaves"] == []
    assert not send(server, "GET", "/graft/adapters")["adapters"]
    load(server, "a", folders["v0"])
    assert row(server, "a")["identity"] == said["identity"]
    assert row(server, "a")["bytes"] == said["bytes"]
    running = Stream(server, Request("a", SHORT, 300)).started()
    said = send(server, "DELETE", "/graft/adapters/a?dry_run=true")
    assert (said["requests"], said["following_bytes"] > 0) == (1, True)
    running.result()
    server.settle()
    said = send(server, "DELETE", "/graft/adapters/a?dry_run=true")
    done = send(server, "DELETE", "/graft/adapters/a")
    assert said == done
    assert done["freed_bytes"] > 0


def test_time_to_live(server: Server, folders: dict[str, Path]) -> None:
    for name, version in (("a", "v0"), ("b", "v1"), ("c", "v2")):
        load(server, name, folders[version], pinned=name == "b")
    send(server, "PUT", "/graft/aliases/line", {"adapter": "c"})
    running = Stream(server, Request("a", SHORT, 600)).started()
    for name in ("a", "b", "c"):
        send(server, "PATCH", f"/graft/adapters/{name}", {"ttl_seconds": 0.3})
    wait_until(lambda: not running.is_running() or len(running.tokens) > 300)
    wait_until(lambda: "a" not in server.requests()["adapters"])
    assert len(running.result()["output_ids"]) == 600
    assert server.post("/generate", Request("a", SHORT).body()).status_code == NOT_FOUND
    left = {one["name"] for one in send(server, "GET", "/graft/adapters")["adapters"]}
    assert left == {"b", "c"}, "one is pinned, the other has an alias"
    send(server, "PATCH", "/graft/adapters/b", {"pinned": False})
    send(server, "PATCH", "/graft/adapters/c", {"ttl_seconds": None})
    send(server, "DELETE", "/graft/aliases/line")
    wait_until(lambda: set(server.requests()["adapters"]) == {"c"})


# ---- aliases


def test_an_alias_is_a_name_everywhere(
    server: Server, folders: dict[str, Path], truth: Reference
) -> None:
    load(server, "a", folders["v0"])
    send(server, "PUT", "/graft/aliases/business%2Fline", {"adapter": "a"})
    assert send(server, "GET", "/graft/aliases") == {"business/line": "a"}
    assert send(server, "GET", "/graft/aliases/business/line")["adapter"] == "a"
    assert row(server, "a")["aliases"] == ["business/line"]
    wanted = truth.answer("v0", SHORT, 16).tokens
    words = [tiny_model.word(token) for token in wanted]
    body = {"prompt": list(SHORT), "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    for model in ("business/line", "base:business/line"):
        reply = server.post("/v1/completions", body | {"model": model}).json()
        assert reply["choices"][0]["text"].split() == words
        assert reply["model"] == model, "a reply names what the client asked for"
    assert server.ask(Request("business/line", SHORT))["output_ids"] == list(wanted)
    both = server.ask_batch([Request("business/line", SHORT), Request(None, SHORT)])
    assert both[0]["output_ids"] == list(wanted) != both[1]["output_ids"]
    said = {"model": "business/line", "messages": [{"role": "user", "content": "w1 w2"}]}
    assert server.post("/v1/chat/completions", said | {"max_tokens": 2}).status_code == OK
    message = server.post("/v1/messages", said | {"max_tokens": 2})
    assert message.status_code == OK, message.text
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert (cards["business/line"]["root"], cards["business/line"]["parent"]) == ("a", "base")
    assert server.get("/v1/models/business/line").json()["root"] == "a"
    missing = server.post("/generate", Request("business/lime", SHORT).body())
    assert missing.status_code == NOT_FOUND
    assert "business/line" in missing.text


def test_an_alias_is_nobody_elses_name(server: Server, folders: dict[str, Path]) -> None:
    load(server, "a", folders["v0"])
    load(server, "b", folders["v1"])
    send(server, "PUT", "/graft/aliases/line", {"adapter": "a"})
    body = {"name": "line", "path": str(folders["v2"])}
    assert "alias" in refused(server, "POST", "/graft/adapters", body)[1]
    assert server.load("line", folders["v2"]).status_code == BAD_REQUEST
    assert refused(server, "DELETE", "/graft/adapters/a")[0] == CONFLICT
    assert server.unload("a").status_code == BAD_REQUEST
    assert refused(server, "PUT", "/graft/aliases/more", {"adapter": "line"})[0] == CONFLICT
    # One change of two is wrong: neither happens.
    changes = {"line": "b", "more": "nobody"}
    assert refused(server, "PATCH", "/graft/aliases", changes)[0] == CONFLICT
    assert send(server, "GET", "/graft/aliases") == {"line": "a"}
    changes = {"line": "b", "more": "a"}
    assert send(server, "PATCH", "/graft/aliases", changes) == changes
    send(server, "PATCH", "/graft/aliases", {"line": None, "more": None})
    send(server, "DELETE", "/graft/adapters/a")
    # A folder that nobody has loaded can have an alias too.
    send(server, "PUT", "/graft/aliases/line", {"adapter": ROOT_NAME})
    assert server.ask(Request("line", SHORT))["output_ids"]


def test_a_switch_under_traffic(server: Server, folders: dict[str, Path], truth: Reference) -> None:
    load(server, "old", folders["v0"])
    load(server, "new", folders["v1"])
    send(server, "PUT", "/graft/aliases/line", {"adapter": "old"})
    running = Stream(server, Request("line", SHORT, 200)).started(3)
    stop, seen = threading.Event(), []

    def ask(number: int) -> None:
        while not stop.is_set():
            request = Request("line", tiny_model.prompt(20, seed=number), 8)
            seen.append((request, server.ask(request)))

    with ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(ask, number) for number in range(3)]
        wait_until(lambda: len(seen) >= 6)
        for target in ("new", "old", "new"):
            send(server, "PUT", "/graft/aliases/line", {"adapter": target})
            count = len(seen)
            wait_until(lambda count=count: len(seen) >= count + 6)  # type: ignore[misc]
        stop.set()
        for done in asking:
            done.result()
    check(truth, [Request("v0", SHORT, 200)], [running.result()])
    found = {answered_by(truth, ["v0", "v1"], request, reply) for request, reply in seen}
    assert found == {"v0", "v1"}
    request = Request("line", SHORT)
    check(truth, [Request("v1", SHORT)], [server.ask(request)])


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
