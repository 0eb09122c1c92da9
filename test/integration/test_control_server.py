"""Control of adapters over HTTP, on one real server."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import tiny_model
from control_world import (
    CONFLICT,
    ROOT_NAME,
    SHORT,
    UNAUTHORIZED,
    VERSIONS,
    answer,
    clean,
    controlled,
    fill,
    folders_below,
    load,
    refused,
    row,
    save_root,
    send,
)
from harness import Request, Server, wait_until
from lifecycle import BAD_REQUEST, NOT_FOUND, OK, Stream, answered_by
from reference import Reference, check

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
