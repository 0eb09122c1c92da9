"""Adapters below --graft-adapter-root on a real server: found, followed, fenced in."""

import base64
import dataclasses
import itertools
import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_adapters
import tiny_model
import torch
from adapter_root import fill, put
from harness import (
    ANSWER_SECONDS,
    ONE_REQUEST,
    STRICT,
    Request,
    Server,
    running,
    serve,
    tail,
    wait_until,
)
from reference import Reference, check, difference

from sglang_graft.serving.route_table import TABLE, Does

pytestmark = pytest.mark.server

ADMIN_KEY = "admin-key"
PROMPT = tiny_model.prompt(60, seed=5)
MOST = 40
NUMBERS = itertools.count()
FLAGS = ("--page-size", "16", "--max-total-tokens", "8192", "--admin-api-key", ADMIN_KEY)
FLAGS += ("--graft-adapter-scan-seconds", "0.2", "--graft-max-adapter-mb", "1")
FLAGS += ("--graft-max-adapters", str(MOST))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, adapters: dict[str, Path]) -> Path:
    """The root, with what lies there before the server starts."""
    folder = tmp_path_factory.mktemp
    return fill(folder("root"), folder("outside"), adapters)


@pytest.fixture(scope="module")
def server(
    base_model: Path, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    flags = (*FLAGS, "--graft-adapter-root", str(root))
    with serve(base_model, folder, *flags, env=STRICT) as running:
        yield running


@pytest.fixture(scope="module")
def admin(server: Server) -> Iterator[Server]:
    """The same server, asked with the admin key."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(timeout=ANSWER_SECONDS, headers=headers, limits=ONE_REQUEST) as client:
        yield dataclasses.replace(server, client=client)


def cards(server: Server) -> dict[str, dict[str, Any]]:
    """What /v1/models lists, by id."""
    listed = server.get("/v1/models").json()["data"]
    assert len({card["id"] for card in listed}) == len(listed)
    return {card["id"]: card for card in listed}


def ask(server: Server, name: str | None) -> httpx.Response:
    return server.post("/generate", Request(name, PROMPT).body())


def answers(server: Server, reference: Reference, name: str, kind: str) -> bool:
    """Whether `name` answers now as the adapter `kind` does."""
    response = ask(server, name)
    assert response.status_code == httpx.codes.OK, response.text
    wanted = reference.answer(kind, PROMPT, 16)
    return difference(response.json()["output_ids"], wanted) is None


def loads(server: Server, name: str) -> int:
    """How often `name` was loaded, or replaced by what its folder holds."""
    log = server.log.read_text()
    lines = (f"Start load Lora adapter. Lora name={name},", f"Adapter {name} has changed and is")
    return sum(map(log.count, lines))


def test_C136_C137_exactly_the_usable_folders_are_listed(
    server: Server, base_model: Path, root: Path, reference: Reference
) -> None:
    base = str(base_model)
    names = {"legal", "team/sales", "alias"}
    before = cards(server)
    assert before.keys() == {base, *names}
    assert all(before[name]["parent"] == base for name in names)
    assert Path(before["team/sales"]["root"]) == root.resolve() / "team/sales"
    assert loads(server, "legal") == 0
    assert answers(server, reference, "legal", "all-r16")
    assert answers(server, reference, "team/sales", "patterns")
    assert answers(server, reference, "alias", "all-r16")
    after = cards(server)
    assert {name: (card["root"], card["parent"]) for name, card in after.items()} == {
        name: (card["root"], card["parent"]) for name, card in before.items()
    }
    assert server.get("/v1/models/team/sales").json()["parent"] == base
    assert server.get(f"/v1/models/{base}").json()["id"] == base
    assert server.get("/v1/models/nobody").status_code == httpx.codes.NOT_FOUND


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("torn", "is missing"),
        ("embeds", "lm_head"),
        ("huge", "--graft-max-adapter-mb"),
        ("out", "by a link"),
        ("half-out", "by a link"),
        ("pipe", "not a regular file"),
    ],
)
def test_C59_C74_C137_a_bad_folder_is_refused_to_those_who_name_it(
    server: Server, root: Path, name: str, reason: str
) -> None:
    chat = {"model": name, "messages": [{"role": "user", "content": "w1"}], "max_tokens": 2}
    for path, body in (
        ("/generate", {"input_ids": [1], "lora_path": name}),
        ("/v1/completions", {"prompt": "w1", "model": name}),
        ("/v1/completions", {"prompt": "w1", "model": f"default:{name}", "stream": True}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "stream": True}),
        ("/v1/messages", chat),
        ("/generate", {"input_ids": [1], "lora_path": name, "stream": True}),
    ):
        response = server.post(path, body)
        assert response.status_code == httpx.codes.BAD_REQUEST, (path, response.text)
        assert reason in response.text
        assert str(root.parent) not in response.text
    assert name not in cards(server)
    assert ask(server, None).status_code == httpx.codes.OK


@pytest.mark.parametrize(
    "name",
    [
        *(
            ".hidden",
            "bad name",
            "notes",
            "nobody",
            "Legal",
            "legal/",
            "./legal",
            "team",
            "team//sales",
        ),
        *("../root/legal", "legal/../legal", "team/../legal", "../../etc", "/etc", "file:///etc"),
        *("org/hub-name", "https://example.com/a", "legal\0", "a" * 300, "\u202elegal", "~", "*"),
    ],
)
def test_C61_C74_C133_other_names_are_not_found(server: Server, root: Path, name: str) -> None:
    before = server.log.read_text().count("Start load Lora adapter")
    response = server.post("/generate", {"input_ids": [1], "lora_path": name})
    assert response.status_code == httpx.codes.NOT_FOUND, response.text
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"):
        body = {"model": name, "prompt": "w1", "messages": [], "input": "w1", "max_tokens": 2}
        body["messages"] = [{"role": "user", "content": "w1"}]
        response = server.post(path, body)
        assert response.status_code == httpx.codes.NOT_FOUND, (path, response.text)
    response = server.post("/generate", {"input_ids": [1], "lora_path": str(root / "legal")})
    assert response.status_code == httpx.codes.NOT_FOUND
    assert server.log.read_text().count("Start load Lora adapter") == before


def test_a_folder_named_default_never_takes_the_base_models_requests(server: Server) -> None:
    base = server.post("/v1/completions", {"prompt": "w1 w2", "model": "default", "temperature": 0})
    assert base.status_code == httpx.codes.OK
    assert "default" not in cards(server)
    refused = server.post("/generate", {"input_ids": [1], "lora_path": "default"})
    assert refused.status_code == httpx.codes.NOT_FOUND


def test_parallel_first_uses_load_once(
    server: Server, root: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    put(root / "many", adapters["odd-r5"])
    with ThreadPoolExecutor(8) as threads:
        right = list(threads.map(lambda _: answers(server, reference, "many", "odd-r5"), range(8)))
    assert all(right)
    assert loads(server, "many") == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "w1 w2", "lora_path": "NAME"}),
        ("/generate", {"text": ["w1 w2", "w3"], "lora_path": ["NAME", None]}),
        ("/generate", {"text": "w1 w2", "lora_path": "NAME", "stream": True}),
        ("/v1/completions", {"prompt": "w1 w2", "model": "NAME"}),
        ("/v1/completions", {"prompt": "w1 w2", "model": "default:NAME"}),
        ("/v1/completions", {"prompt": "w1 w2", "model": "default", "lora_path": "NAME"}),
        ("/v1/completions", {"prompt": "w1 w2", "model": "NAME", "stream": True}),
        ("/v1/chat/completions", {"model": "NAME"}),
        ("/v1/chat/completions", {"model": "NAME", "stream": True}),
        ("/v1/messages", {"model": "NAME"}),
        ("/invocations", {"model": "NAME"}),
        ("/vertex_generate", {"instances": [{"text": "w1"}], "parameters": {"lora_path": "NAME"}}),
    ],
)
def test_every_route_loads_on_first_use(
    server: Server,
    root: Path,
    adapters: dict[str, Path],
    path: str,
    body: dict[str, Any],
) -> None:
    name = f"first-{next(NUMBERS)}"
    put(root / name, adapters["q-r4"])
    asked = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2} | body
    asked = json.loads(json.dumps(asked).replace("NAME", name))
    response = server.post(path, asked)
    assert response.status_code == httpx.codes.OK, response.text
    assert loads(server, name) == 1
    shutil.rmtree(root / name)


def test_routes_without_adapters_refuse_a_folder(server: Server) -> None:
    body = {"model": "team/sales", "input": "w1"}
    assert server.post("/v1/responses", body).status_code == httpx.codes.BAD_REQUEST


def test_a_folder_is_taken_once_it_is_whole(
    server: Server, root: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    folder = root / "slow"
    folder.mkdir()
    for name in ("adapter_config.json", tiny_adapters.WEIGHTS):
        shutil.copy(adapters["up-r8"] / name, folder)
        assert "slow" not in cards(server) or name == tiny_adapters.WEIGHTS
    wait_until(lambda: "slow" in cards(server))
    assert answers(server, reference, "slow", "up-r8")


def test_changed_content_is_served_next_and_kv_never_mixes(
    server: Server, root: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    put(root / "moving", adapters["rslora-r8"])
    assert answers(server, reference, "moving", "rslora-r8")
    assert answers(server, reference, "moving", "rslora-r8")  # on its own KV
    put(root / "moving", adapters["bf16"])
    wait_until(lambda: loads(server, "moving") == 2)
    assert answers(server, reference, "moving", "bf16")
    for name in ("adapter_config.json", tiny_adapters.WEIGHTS):  # in place, without a new inode
        (root / "moving" / name).write_bytes((adapters["down-r16"] / name).read_bytes())
    wait_until(lambda: loads(server, "moving") >= 3)
    wait_until(lambda: answers(server, reference, "moving", "down-r16"))


def test_a_change_under_load_gives_whole_answers_of_one_or_the_other(
    server: Server, root: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    put(root / "busy", adapters["fp16"])
    assert answers(server, reference, "busy", "fp16")
    kinds = [reference.answer(kind, PROMPT, 16) for kind in ("fp16", "layer-1")]

    def one(number: int) -> bool:
        if number == 6:
            put(root / "busy", adapters["layer-1"])
        response = ask(server, "busy")
        assert response.status_code == httpx.codes.OK, response.text
        tokens = response.json()["output_ids"]
        return any(difference(tokens, wanted) is None for wanted in kinds)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(one, range(40)))
    wait_until(lambda: answers(server, reference, "busy", "layer-1"))


def test_a_change_for_the_worse_is_refused_and_mended(
    server: Server, root: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    put(root / "worse", adapters["q-r4"])
    assert answers(server, reference, "worse", "q-r4")
    (root / "worse/adapter_config.json").write_text("{")
    wait_until(lambda: ask(server, "worse").status_code == httpx.codes.BAD_REQUEST)
    assert "worse" not in cards(server)
    put(root / "worse", adapters["qv-r8"])
    wait_until(lambda: "worse" in cards(server))
    assert answers(server, reference, "worse", "qv-r8")


def test_weights_that_only_loading_can_refuse(
    server: Server, root: Path, adapters: dict[str, Path]
) -> None:
    put(root / "nan", adapters["q-r4"])
    tiny_adapters.edit_tensors(root / "nan", lambda _, tensor: tensor * float("nan"))
    for _ in range(2):
        response = ask(server, "nan")
        assert response.status_code == httpx.codes.BAD_REQUEST
        assert "NaN" in response.text
        assert str(root.parent) not in response.text
    assert loads(server, "nan") == 1
    assert "nan" not in cards(server)


def test_C136_a_removed_folder_is_unloaded_and_a_new_one_listed(
    server: Server, admin: Server, root: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    put(root / "guest", adapters["bf16"])
    wait_until(lambda: "guest" in cards(server))
    assert answers(server, reference, "guest", "bf16")
    shutil.rmtree(root / "guest")
    wait_until(lambda: "guest" not in cards(server))
    wait_until(lambda: "guest" not in {row["name"] for row in admin.pool()["adapters"]})
    assert ask(server, "guest").status_code == httpx.codes.NOT_FOUND


def test_an_unload_by_hand_lasts_until_the_next_use(
    server: Server, admin: Server, reference: Reference
) -> None:
    assert answers(server, reference, "team/sales", "patterns")
    assert admin.unload("team/sales").status_code == httpx.codes.OK
    assert "team/sales" in cards(server)
    assert answers(server, reference, "team/sales", "patterns")


@pytest.mark.parametrize(
    "path",
    [
        *("/etc", "../../etc", "ROOT/../root/legal", "ROOT/legal/..", "ROOT", "ROOT/nobody"),
        *("ROOT/out", "ROOT/half-out", "ROOT/pipe", "ROOT/legal/adapter_config.json", "/dev/zero"),
        *("file:///etc", "file://ROOT/legal", "https://example.com/a", "org/hub-name", "", "legal"),
        *("ROOT/legal\0", "ROOT/" + "a" * 5000, "~"),
    ],
)
def test_C74_hostile_paths_are_refused_to_the_admin_too(
    admin: Server, root: Path, path: str
) -> None:
    before = admin.log.read_text().count("Start load Lora adapter")
    body = {"lora_name": "hostile", "lora_path": path.replace("ROOT", str(root))}
    response = admin.post("/load_lora_adapter", body)
    assert response.status_code == httpx.codes.BAD_REQUEST, response.text
    assert "path" in response.json()["error_message"] or "file" in response.json()["error_message"]
    assert admin.log.read_text().count("Start load Lora adapter") == before
    assert ask(admin, "hostile").status_code == httpx.codes.NOT_FOUND


@pytest.mark.parametrize("name", ["", " x", "a\nb", "a" * 200, "default"])
def test_names_that_mean_something_else_are_refused(admin: Server, root: Path, name: str) -> None:
    response = admin.load(name, root / "legal")
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert "lora_name" in response.json()["error_message"]


def test_the_admin_loads_below_the_root(admin: Server, root: Path, reference: Reference) -> None:
    assert admin.load("x:y", root / "legal").status_code == httpx.codes.OK
    assert answers(admin, reference, "x:y", "all-r16")
    assert admin.unload("x:y").status_code == httpx.codes.OK


@pytest.mark.parametrize(
    "path", sorted(path for path, does in TABLE.items() if does is Does.CHANGES)
)
def test_what_changes_the_server_needs_the_admin_key(server: Server, path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE"):
        for headers in ({}, {"Authorization": "Bearer nobody"}):
            response = server.client.request(method, server.url + path, headers=headers)
            assert response.status_code == httpx.codes.UNAUTHORIZED, (method, response.text)


class Marker:
    """A pickle that makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_C73_pickled_tensors_of_a_client_are_never_unpickled(
    server: Server, admin: Server, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    program = base64.b64encode(pickle.dumps(Marker(marker))).decode()
    body = {"lora_name": "evil", "config_dict": {}, "serialized_named_tensors": [program]}
    assert server.post("/load_lora_adapter_from_tensors", body).status_code == 401
    response = admin.post("/load_lora_adapter_from_tensors", body)
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert "not supported" in response.text
    assert not marker.exists()


def test_C73_a_pickle_below_the_root_never_runs(
    server: Server, root: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    folder = put(root / "pickled", adapters["q-r4"])
    (folder / tiny_adapters.WEIGHTS).unlink()
    torch.save(Marker(tmp_path / "marker"), folder / "adapter_model.bin")
    response = ask(server, "pickled")
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert "weights-only" in response.text
    assert not (tmp_path / "marker").exists()


def test_an_engine_loads_on_first_use(
    base_model: Path, root: Path, reference: Reference, tmp_path: Path
) -> None:
    kinds = {None: None, "legal": "all-r16", "team/sales": "patterns"}
    requests = [Request(name, PROMPT) for name in kinds]
    given = {
        "model": str(base_model),
        "adapters": {},
        "engines": [{"max_total_tokens": 8192}],
        "requests": [request.body() for request in requests],
    }
    log = tmp_path / "engine.log"
    line = [sys.executable, str(Path(__file__).with_name("engine_script.py")), json.dumps(given)]
    env = {"GRAFT_ENABLE": "1", "GRAFT_ADAPTER_ROOT": str(root), "GRAFT_MAX_ADAPTER_MB": "1"}
    with running(line, log, env) as process:
        assert process.wait() == 0, tail(log)
    (result,) = json.loads(log.read_text().splitlines()[-1])
    assert "legal, team/sales" in result["unknown"]
    for kind, tokens in zip(kinds.values(), result["tokens"], strict=True):
        assert difference(tokens, reference.answer(kind, PROMPT, 16)) is None
    assert "destroyed" not in log.read_text()


def test_only_so_many_adapters_are_loaded_at_once(
    server: Server, admin: Server, root: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    loaded = len(admin.pool()["adapters"])
    for number in range(loaded, MOST):
        assert admin.load(f"filler {number}", root / "legal").status_code == httpx.codes.OK
    response = admin.load("one more", root / "legal")
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert "--graft-max-adapters" in response.text
    put(root / "late", adapters["q-r4"])
    response = ask(server, "late")
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert "--graft-max-adapters" in response.text
    for number in range(loaded, MOST):
        assert admin.unload(f"filler {number}").status_code == httpx.codes.OK
    requests = [Request(name, PROMPT) for name in (None, "all-r16")]
    asked = [Request(name, PROMPT) for name in (None, "legal")]
    check(reference, requests, server.ask_all(asked, 2))
    admin.flush()
    pages = admin.pool()["pages"]
    assert pages["free"] == pages["total"]
