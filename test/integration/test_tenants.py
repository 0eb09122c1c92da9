"""Tenants on a real server: who may do what, whose pages are whose, and what changes meanwhile."""

import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import tenant_world
import tiny_model
import yaml
from adapter_root import put
from documents import blocks, run_as_written
from harness import STRICT, Request, Server, greedy, serve, wait_until
from lifecycle import Stream
from openai import OpenAI, PermissionDeniedError, RateLimitError
from reference import Reference, difference
from tenant_world import ADMIN_KEY, CAP, COLD, FLOOR, World

from sglang_graft.serving.route_table import TABLE, Does
from sglang_graft.serving.tenant_gate import OPEN, TENANTS_READ
from sglang_graft.tenants import make_key

pytestmark = pytest.mark.server

POOL_PAGES = 160
PROMPT = tiny_model.prompt(60, seed=5)
SEEDS = itertools.count(1000)
FLAGS = ("--page-size", "16", "--max-total-tokens", str(POOL_PAGES * 16))
FLAGS += ("--admin-api-key", ADMIN_KEY)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tenant_world.save_adapters(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path]) -> Reference:
    named = {name.replace("/", "-"): folder for name, folder in folders.items()}
    return Reference(tiny_model.new_model(), named)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return tenant_world.make(tmp_path_factory.mktemp("tenants") / "tenants.yaml")


@pytest.fixture(scope="module")
def server(
    base_model: Path,
    world: World,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    root = folders["b/main"].parents[1]
    flags = (*FLAGS, "--graft-adapter-root", str(root), "--graft-tenants", str(world.path))
    with serve(base_model, tmp_path_factory.mktemp("server"), *flags, env=STRICT) as running:
        yield running
    log = running.log.read_text(errors="replace")
    for key in world.keys.values():
        assert key not in log, "a tenant's key is in the log"
    for tenant in world.tenants.values():
        assert not [hashed for hashed in tenant["keys"] if hashed in log], "a hash is in the log"


@pytest.fixture(scope="module")
def ask(server: Server, world: World) -> Iterator[dict[str, Server]]:
    """The server as each tenant sees it."""
    with ExitStack() as stack:
        names = [*world.keys, "admin", ""]
        yield {name: stack.enter_context(world.asking(server, name)) for name in names}


def tenants(ask: dict[str, Server]) -> dict[str, Any]:
    report: dict[str, Any] = ask["admin"].get("/graft/tenants").json()
    return report


def held(ask: dict[str, Server], name: str) -> int:
    return int(tenants(ask)["tenants"][name]["pages"]["held"])


def is_right(truth: Reference, name: str | None, prompt: Any, tokens: list[int]) -> bool:
    wanted = truth.answer(name.replace("/", "-") if name else None, prompt, len(tokens))
    return difference(tokens, wanted) is None


def naming(name: str | None) -> dict[str, dict[str, Any]]:
    """A request for `name` in every way that a request can be made, by path and form."""
    text = {"messages": [{"role": "user", "content": "w1 w2 w3"}], "max_tokens": 2}
    one = {"input_ids": list(PROMPT), "sampling_params": greedy(2)}
    two = {"input_ids": [list(PROMPT)] * 2, "sampling_params": greedy(2)}
    model = name or "default"
    forms: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"model": model, **text},
        "/v1/chat/completions stream": {"model": model, "stream": True, **text},
        "/invocations": {"model": model, **text},
        "/v1/completions": {"model": model, "prompt": "w1 w2", "max_tokens": 2},
        "/v1/completions stream": {"model": model, "prompt": "w1", "stream": True},
        "/v1/messages": {"model": model, **text},
        "/v1/messages stream": {"model": model, "stream": True, **text},
        "/generate": {"lora_path": name, **one},
        "/generate stream": {"lora_path": name, "stream": True, **one},
        "/generate one of a batch": {"lora_path": [name, name], **two},
        "/vertex_generate": {
            "instances": [{"input_ids": list(PROMPT)}],
            "parameters": {"lora_path": name, "sampling_params": greedy(2)},
        },
        "/v1/score": {"model": model, "query": "w1", "items": ["w2"], "label_token_ids": [3]},
        "/v1/rerank": {"model": model, "query": "w1", "documents": ["w2"]},
        "/v1/responses": {"model": model, "input": "w1 w2", "max_output_tokens": 2},
        "/api/chat": {"model": model, "messages": text["messages"], "stream": False},
        "/api/generate": {"model": model, "prompt": "w1", "stream": False},
    }
    if name is not None:
        forms["/v1/chat/completions base:name"] = {**text, "model": f"default:{name}"}
        forms["/v1/chat/completions lora_path"] = {**text, "model": "default", "lora_path": name}
        forms["/v1/completions list"] = {
            "model": "default",
            "prompt": ["w1", "w2"],
            "lora_path": [name, name],
        }
    return forms


PUBLIC = sorted(path for path, does in TABLE.items() if does in (Does.READS, Does.SERVES))
ADMIN = sorted(path for path, does in TABLE.items() if does in (Does.OPERATES, Does.CHANGES))


def fill(path: str) -> str:
    return path.replace("{model:path}", "x").replace("{response_id}", "resp_x")


@pytest.mark.parametrize("key", ["", "wrong", "hash"])
def test_every_route_but_health_wants_a_known_key(
    server: Server, ask: dict[str, Server], world: World, key: str
) -> None:
    key = world.tenants["a"]["keys"][0] if key == "hash" else key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for path in (*PUBLIC, *ADMIN, "/no/such/route"):
        if path in OPEN or path == "/v1/realtime":
            continue
        for method in ("GET", "POST"):
            answer = server.client.request(method, server.url + fill(path), headers=headers)
            assert answer.status_code == 401, (method, path, answer.text)
    assert ask[""].get("/health").status_code == 200


def test_keys_come_in_both_headers(server: Server, world: World) -> None:
    key = world.keys["b"]
    for headers, status in (
        ({"Authorization": f"Bearer {key}"}, 200),
        ({"Authorization": f"bearer  {key}"}, 200),
        ({"X-Api-Key": key}, 200),
        ({"Authorization": f"Basic {key}"}, 401),
        ({"Authorization": "Bearer wrong", "X-Api-Key": key}, 401),
        ({"X-Api-Key": ADMIN_KEY}, 200),
    ):
        answer = server.client.get(server.url + "/v1/models", headers=headers)
        assert answer.status_code == status, (headers, answer.text)


def test_tenants_never_reach_what_operates_the_server(ask: dict[str, Server]) -> None:
    for path in ADMIN:
        for answer in (ask["b"].get(path), ask["b"].post(path)):
            assert answer.status_code in (401, 403), (path, answer.text)
    for path in PUBLIC:
        if TABLE[path] is Does.READS and path not in TENANTS_READ | OPEN and "{" not in path:
            assert ask["b"].get(path).status_code == 403, path
    assert ask["admin"].get("/server_info").status_code == 200


@pytest.mark.parametrize("name", ["a/x1", "a/nothing", None])
def test_what_a_key_may_not_use_is_403_in_every_form(
    ask: dict[str, Server], name: str | None
) -> None:
    """The same for what exists and what does not; d may use neither a's adapters nor the base."""
    for form, body in naming(name).items():
        answer = ask["d"].post(form.split()[0], body)
        assert answer.status_code == 403, (form, answer.status_code, answer.text)
        assert "a/x" not in answer.text.replace(str(name), ""), form


def test_one_name_of_a_batch_suffices(ask: dict[str, Server]) -> None:
    batch = {"input_ids": [list(PROMPT)] * 2, "sampling_params": greedy(2)}
    for names in (["both/shared", "a/x0"], ["both/shared", None]):
        assert ask["d"].post("/generate", {**batch, "lora_path": names}).status_code == 403
    names = ["both/shared", "both/shared"]
    assert ask["d"].post("/generate", {**batch, "lora_path": names}).status_code == 200


def test_an_adapters_id_opens_nothing(ask: dict[str, Server], truth: Reference) -> None:
    """SGLang takes `lora_id` from the body of /generate."""
    ask["b"].generate(Request("b/main", PROMPT).body())
    state = ask["admin"].get("/server_info").json()["internal_states"][0]
    assert "b/main" in json.dumps(state)
    listed = ask["admin"].get("/graft/requests").json()["adapters"]
    assert "b/main" in listed
    body = Request(None, PROMPT).body() | {"lora_id": "0" * 32, "http_worker_ipc": "ipc://x"}
    answer = ask["f"].generate(body)
    assert is_right(truth, None, PROMPT, answer["output_ids"]), "the base model answers"


def test_an_allowed_name_works_in_every_form_that_serves_adapters(ask: dict[str, Server]) -> None:
    base_only = ("/v1/score", "/v1/rerank", "/v1/responses", "/api/")
    for form, body in naming("b/main").items():
        status = 400 if form.startswith(base_only) else 200
        answer = ask["b"].post(form.split()[0], body)
        assert answer.status_code == status, (form, answer.status_code, answer.text)
    missing = ask["b"].post("/generate", Request("b/nothing", PROMPT).body())
    assert missing.status_code == 404
    assert "b/main" in missing.text
    assert "a/x" not in missing.text


def test_each_tenant_sees_its_own_models(ask: dict[str, Server]) -> None:
    def ids(name: str) -> set[str]:
        return {card["id"] for card in ask[name].get("/v1/models").json()["data"]}

    everything = ids("admin")
    assert len([name for name in everything if name.startswith("a/")]) == COLD
    (base,) = ids("f")
    assert ids("b") == {base, "b/main", "b/other", "both/shared"}
    assert ids("d") == {"both/shared"}
    assert ask["b"].get("/v1/models/b/main").status_code == 200
    hidden, missing = (ask["b"].get(f"/v1/models/a/{name}") for name in ("x1", "nothing"))
    assert hidden.status_code == missing.status_code == 404
    assert hidden.text.replace("a/x1", "") == missing.text.replace("a/nothing", "")


def test_the_openai_client(server: Server, world: World) -> None:
    message = [{"role": "user", "content": "w1 w2"}]
    with OpenAI(base_url=f"{server.url}/v1", api_key=world.keys["b"], max_retries=0) as client:
        chat = client.chat.completions
        answer = chat.create(model="b/main", messages=message, max_tokens=3)  # type: ignore[call-overload]
        assert answer.choices[0].message.content
        for stream in (False, True):
            with pytest.raises(PermissionDeniedError, match="may not use"):
                chat.create(model="a/x0", messages=message, stream=stream)  # type: ignore[call-overload]


def test_rates_are_429_with_retry_after(
    server: Server, ask: dict[str, Server], world: World
) -> None:
    body = Request("b/other", PROMPT, 2).body()
    batch = {**body, "input_ids": [list(PROMPT)] * 2, "lora_path": ["b/other"] * 2}
    assert ask["c"].post("/generate", body).status_code == 200
    assert ask["c"].post("/generate", batch).status_code == 200  # two more: three were there
    for form, content in naming("b/other").items():
        answer = ask["c"].post(form.split()[0], content)
        assert answer.status_code == 429, (form, answer.text)
        assert 0 < int(answer.headers["Retry-After"]) <= 100
    assert ask["c"].get("/v1/models").status_code == 200, "reading is free"
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key=world.keys["c"], max_retries=0) as client,
        pytest.raises(RateLimitError, match="used its rate"),
    ):
        client.completions.create(model="b/other", prompt="w1", stream=True)
    assert tenants(ask)["tenants"]["c"]["refused_by_rate"] > 0


def cached(server: Server, **more: Any) -> int:
    body = Request("both/shared", SHARED_PROMPT, 2).body()
    return int(server.generate(body | more)["meta_info"]["cached_tokens"])


SHARED_PROMPT = tiny_model.prompt(100, seed=77)


def test_kv_of_one_tenant_is_not_found_by_another(ask: dict[str, Server]) -> None:
    assert cached(ask["b"]) == 0
    assert cached(ask["b"]) > 0
    assert cached(ask["a"]) == 0
    for forged in ("\x01graft\x01b\x01p", "pb\x01", "b", "\x01graft\x01\x01o"):
        assert cached(ask["a"], extra_key=forged) == 0
        assert cached(ask["d"], extra_key=forged) == 0
    assert cached(ask["d"]) == 0
    assert cached(ask["e"]) > 0, "d and e share their KV"
    assert cached(ask["b"], extra_key="mine") == 0
    assert cached(ask["b"], extra_key="mine") > 0


def test_ids_of_requests_are_a_tenants_own(ask: dict[str, Server]) -> None:
    running = Stream(ask["b"], Request("b/main", PROMPT, 300), rid="abc").started()
    twin = Stream(ask["a"], Request("both/shared", PROMPT, 200), rid="abc").started()
    prefix = Stream(ask["a"], Request("both/shared", PROMPT, 200), rid="a").started()
    assert ask["a"].post("/abort_request", {"rid": "t:b:abc"}).status_code in (401, 403)
    assert ask["a"].post("/abort_request", {"abort_all": True}).status_code in (401, 403)
    prefix.leave()
    twin.leave()
    assert len(running.result()["output_ids"]) == 300
    answer = ask["b"].generate(Request("b/main", PROMPT, 2).body() | {"rid": "mine"})
    assert answer["meta_info"]["id"] == "t:b:mine"
    for session in ({"session_params": {"id": "x"}}, {"session_id": "x"}):
        body = Request("b/main", PROMPT, 2).body() | session
        assert ask["b"].post("/generate", body).status_code == 403


def test_responses_belong_to_their_tenant(ask: dict[str, Server]) -> None:
    body = {"model": "default", "input": "w1 w2", "max_output_tokens": 2, "store": True}
    made = ask["b"].post("/v1/responses", body | {"request_id": "resp_chosen"}).json()
    path = f"/v1/responses/{made['id']}"
    assert ask["b"].get(path).json()["id"] == made["id"]
    for answer in (
        ask["f"].get(path),
        ask["f"].post(f"{path}/cancel"),
        ask["f"].post("/v1/responses", body | {"previous_response_id": made["id"]}),
        ask["f"].get("/v1/responses/resp_t:b:nothing"),
    ):
        assert answer.status_code == 404, answer.text


def lookups(admin: Server) -> float:
    """Requests whose adapter was looked up so far."""
    lines = admin.get("/metrics").text.splitlines()
    name = "graft_adapter_lookups_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_a_flood_leaves_a_floor_alone_and_crosses_no_answer(
    ask: dict[str, Server], truth: Reference
) -> None:
    """a: 50 cold adapters at once, below its cap. b: one conversation at its floor."""
    for number in range(10):  # b comes to hold its floor
        ask["b"].ask(Request("b/main", tiny_model.prompt(200, seed=number), 4))
    assert held(ask, "b") >= FLOOR
    stop, seen, caps = threading.Event(), [], []

    def watch() -> None:
        while not stop.wait(0.05):
            pages = {name: row["pages"] for name, row in tenants(ask)["tenants"].items()}
            seen.append(pages["b"]["held"])
            caps.append(pages["a"]["held"])

    loads = ask["admin"].pool()["adapters"]
    before = {row["name"]: row["loads"] for row in loads}
    looked_up = lookups(ask["admin"])
    flood = [Request(f"a/x{n}", tiny_model.prompt(90, seed=500 + n), 6) for n in range(COLD)]
    mine = [Request("b/main", tiny_model.prompt(60 + n, seed=3), 4) for n in range(12)]
    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(COLD) as threads:
        pending = [threads.submit(ask["a"].ask, request) for request in flood]
        answers = [ask["b"].ask(request) for request in mine]
        others = [future.result() for future in pending]
    stop.set()
    watcher.join()
    for request, answer in zip([*flood, *mine], [*others, *answers], strict=True):
        assert is_right(truth, request.adapter, request.prompt, answer["output_ids"])
    assert tenants(ask)["floors_broken"] == 0
    assert min(seen) >= FLOOR, "b was pushed below its floor"
    assert lookups(ask["admin"]) - looked_up == len(flood) + len(mine), "each request counts once"
    assert 0 < max(caps) <= CAP
    after = {row["name"]: row["loads"] for row in ask["admin"].pool()["adapters"]}
    assert after["b/main"] == before["b/main"], "b's adapter never had to come back"
    assert sum(after[f"a/x{n}"] for n in range(COLD)) >= COLD


def test_a_request_above_its_cap_is_refused_with_the_figures(ask: dict[str, Server]) -> None:
    body = Request("a/x0", tiny_model.prompt(CAP * 16, seed=1), 2).body()
    answer = ask["a"].post("/generate", body)
    assert answer.status_code == 400
    assert f"page_cap {CAP}" in answer.text


def test_a_changed_file_counts_at_once_and_a_bad_one_changes_nothing(
    server: Server, ask: dict[str, Server], world: World
) -> None:
    body = Request("a/x0", PROMPT, 2).body()
    assert ask["d"].post("/generate", body).status_code == 403
    before, changes = world.path.read_text(), tenants(ask)["changes"]
    world.tenants["d"]["adapters"] = ["both/*", "a/x0"]
    world.write()
    wait_until(lambda: tenants(ask)["changes"] > changes)
    assert ask["d"].post("/generate", body).status_code == 200

    for broken, message in (
        ("tenants: [", "not YAML or JSON"),
        (json.dumps({"tenants": {"d": {"keys": ["x"]}}}), "tenant d: keys: entry 1"),
        (before.replace(f'"page_floor": {FLOOR}', '"page_floor": 159'), "all floors together are"),
    ):
        world.path.write_text(broken)
        wait_until(lambda text=message: text in str(tenants(ask)["error"]))  # type: ignore[misc]
        assert ask["d"].post("/generate", body).status_code == 200, "the old state stays"
        assert tenants(ask)["tenants"]["b"]["pages"]["floor"] == FLOOR
    world.path.unlink()
    wait_until(lambda: "No such file" in str(tenants(ask)["error"]))
    assert ask["d"].post("/generate", body).status_code == 200

    del world.tenants["d"]
    world.write()
    wait_until(lambda: "d" not in tenants(ask)["tenants"])
    assert tenants(ask)["error"] is None
    assert ask["d"].post("/generate", body).status_code == 401
    wait_until(lambda: ask["admin"].requests()["total"] == 0)
    ask["admin"].flush()
    assert held(ask, "b") == held(ask, "a") == 0
    shown = json.dumps(tenants(ask))
    assert not [key for key in world.keys.values() if key in shown]
    assert "sha256" not in shown


def test_tenants_come_by_a_request_or_stay_as_they_were(
    ask: dict[str, Server], world: World
) -> None:
    def put(wanted: dict[str, Any], **query: bool) -> httpx.Response:
        admin = ask["admin"]
        body = {"tenants": wanted}
        return admin.client.put(f"{admin.url}/graft/tenants", json=body, params=query)

    before, old = world.path.read_bytes(), json.loads(world.path.read_text())["tenants"]
    changes = tenants(ask)["changes"]
    more = old | {"g": {"keys": [make_key()[1]], "base": True}}
    for refused, message in (
        (old | {"g": {"keys": ["plain"]}}, "tenant g: keys: entry 1"),
        (old | {"b": old["b"] | {"page_floor": 159}}, "all floors together are"),
    ):
        for dry_run in (True, False):
            answer = put(refused, dry_run=dry_run)
            assert answer.status_code in (400, 409), answer.text
            assert message in answer.text
            assert "plain" not in answer.text
    planned = put(more, dry_run=True).json()
    assert (planned["added"], planned["changes"], world.path.read_bytes()) == (
        ["g"],
        changes,
        before,
    )
    done = put(more)
    assert done.json() == planned | {"changes": changes + 1}
    assert "sha256" not in done.text
    assert "g" in tenants(ask)["tenants"]
    assert put(more).json()["same"]
    assert ask["admin"].post("/graft/tenants/undo", {"changes": changes}).status_code == 409
    undone = ask["admin"].post("/graft/tenants/undo", {"changes": changes + 1})
    assert undone.json()["removed"] == ["g"]
    assert world.path.read_bytes() == before
    assert tenants(ask)["tenants"]["b"]["pages"]["floor"] == FLOOR
    for path in ("/graft/tenants/undo", "/graft/tenants"):
        assert ask["b"].post(path, {"changes": 1}).status_code in (401, 403)
    assert put({}).status_code == 200
    assert tenants(ask)["tenants"] == {}, "an empty file has no tenants"
    assert ask["b"].get("/v1/models").status_code == 401
    world.write()
    wait_until(lambda: set(tenants(ask)["tenants"]) == set(world.tenants))
    assert ask["b"].get("/v1/models").status_code == 200


def test_the_lines_of_the_documents_run_as_written(
    server: Server,
    ask: dict[str, Server],
    world: World,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    put(folders["b/main"].parents[1] / "legal/contracts", folders["b/main"])
    file, synced = blocks("docs/tenants.md", "yaml")
    commands, start, requests, sync = blocks("docs/tenants.md")
    (tmp_path / "tenants.yaml").write_text(file)
    printed = run_as_written(server, commands, tmp_path)
    assert "legal-team" in printed
    assert "--graft-tenants" in start, "test_docs.py looks at its flags; this server has them"
    changes = tenants(ask)["changes"]
    try:
        (tmp_path / "tenants.yaml").replace(world.path)
        wait_until(lambda: tenants(ask)["changes"] > changes)
        wait_until(lambda: "legal/contracts" in ask["admin"].get("/v1/models").text)
        # The first hash of the file is that of "foo".
        hosts, keys = ["localhost:30000"], {"KEY": "foo", "ADMIN_KEY": ADMIN_KEY}
        printed = run_as_written(server, requests, tmp_path, hosts=hosts, **keys)
        assert printed.count('"model":"legal/contracts"') == 1, printed
        assert printed.count('"legal-team"') == 1, printed
        assert "a/x0" not in printed, "the tenant sees its own models"
        (tmp_path / "adapters.yaml").write_text(synced)
        printed = run_as_written(server, sync, tmp_path, GRAFT_ADMIN_KEY=ADMIN_KEY)
        assert printed.count("plan: tenants: changed legal-team; removed batch-jobs") == 2
        assert printed.endswith("done\n")
        assert (
            yaml.safe_load(world.path.read_text())["tenants"] == (yaml.safe_load(synced)["tenants"])
        )
        assert list(tenants(ask)["tenants"]) == ["legal-team"]
    finally:
        ask["admin"].client.patch(f"{server.url}/graft/aliases", json={"summaries": None})
        world.write()
        wait_until(lambda: "legal-team" not in tenants(ask)["tenants"])
