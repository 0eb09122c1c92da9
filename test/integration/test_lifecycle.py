"""Loads, unloads, aborts, disconnects and errors at once: each request is released exactly once."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_adapters
import tiny_model
from harness import STRICT, Request, Server, greedy, serve, wait_until
from lifecycle import (
    BAD_REQUEST,
    NOT_FOUND,
    OK,
    Stream,
    answered_by,
    asking,
    loaded,
    save_versions,
    scheduler_memory,
    unloaded,
)
from reference import Reference, check

pytestmark = pytest.mark.server

NAMES = ("a", "b", "c")
BASE = "served"
SHORT = tiny_model.prompt(40, seed=2)
MAX_RANK = 1024


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_versions(tmp_path_factory.mktemp("adapters"), [*NAMES, "d"])


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path]) -> Reference:
    return Reference(tiny_model.new_model(), folders)


@pytest.fixture(scope="module")
def server(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--page-size", "16", "--max-total-tokens", "32768", "--served-model-name", BASE]
    flags += ["--enable-cache-report", "--max-lora-rank", str(MAX_RANK)]
    with serve(base_model, tmp_path_factory.mktemp("server"), *flags, env=STRICT) as running:
        yield running


@pytest.fixture(autouse=True)
def _three_adapters(server: Server, folders: dict[str, Path]) -> Iterator[None]:
    """Every test starts with a, b and c, and ends with no request left and every page free."""
    for name in NAMES:
        loaded(server, name, folders[name])
    yield
    server.settle()
    for row in server.pool()["adapters"]:
        answer = unloaded(server, row["name"])
        assert (answer["requests"], answer["following_pages"]) == (0, 0)
    server.flush()
    pool = server.pool()
    assert pool["pages"]["free"] == pool["pages"]["total"]
    assert pool["adapter_host_bytes"] == 0
    assert server.requests() == {"total": 0, "adapters": {}, "retired": []}


def samples(adapter: str | None, n: int, new_tokens: int) -> dict[str, Any]:
    body = Request(adapter, SHORT).body()
    return body | {"sampling_params": greedy(new_tokens, n=n)}


def test_c47_an_unload_after_parallel_sampling_returns(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda _: server.generate(samples("a", 8, 60)), range(3)))
    request = Request("a", SHORT, 60)
    for answer in answers:
        check(truth, [request] * 8, answer)
    assert server.requests()["adapters"]["a"] == 0
    other = Stream(server, Request("b", SHORT, 300)).started()
    assert unloaded(server, "a")["requests"] == 0
    loaded(server, "a", folders["a"])
    check(truth, [other.request, request], [other.result(), server.ask(request)])


def test_c47_an_unload_during_parallel_sampling_returns(server: Server, truth: Reference) -> None:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(server.generate, samples("a", 8, 300))
        wait_until(lambda: server.requests()["adapters"]["a"] == 8)
        wait_until(lambda: server.adapter("a")["locks"] == 8)
        answer = unloaded(server, "a")
        assert answer["requests"] == 8
        assert answer["following_pages"] > 0
        assert not running.done()
        assert server.post("/generate", Request("a", SHORT).body()).status_code == NOT_FOUND
        check(truth, [Request("a", SHORT, 300)] * 8, running.result())
    server.settle()
    assert server.pool()["pages"]["adapter"] == 0


def test_c49_aborted_requests_end_promptly(server: Server) -> None:
    ids = [f"request-{i}" for i in range(30)]
    bodies = [
        Request(NAMES[i % 3], tiny_model.prompt(40, i), 1500).body() | {"rid": rid}
        for i, rid in enumerate(ids)
    ]
    with ThreadPoolExecutor(len(ids)) as threads:
        answers = [threads.submit(server.post, "/generate", body) for body in bodies]
        wait_until(lambda: server.requests()["total"] == len(ids))
        for rid in ids:
            assert server.post("/abort_request", {"rid": rid}).status_code == OK
        for answer in answers:
            response = answer.result()
            if response.status_code == OK:
                assert response.json()["meta_info"]["finish_reason"]["type"] == "abort"
    server.settle()


def test_c50_every_way_to_end_releases_once(server: Server, truth: Reference) -> None:
    bad = [
        Request("a", tiny_model.prompt(tiny_model.CONTEXT + 5)).body(),
        Request("a", SHORT).body() | {"sampling_params": {"temperature": -1}},
        Request("b", SHORT).body() | {"sampling_params": {"max_new_tokens": -3}},
        samples("c", 0, 4),
        {"input_ids": [list(SHORT), list(SHORT)], "lora_path": ["a", "nobody"]},
        {"input_ids": [list(SHORT), [10**9]], "lora_path": ["a", "b"]},
    ]
    source = random.Random(3)

    def one(number: int) -> None:
        name, kind = NAMES[number % 3], number % 6
        request = Request(name, tiny_model.prompt(source.choice([20, 90]), number), 40)
        if kind == 0:
            check(truth, [request], [server.ask(request)])
        elif kind == 1:
            body = request.body() | {"sampling_params": greedy(40, n=3)}
            check(truth, [request] * 3, server.generate(body))
        elif kind == 2:
            Stream(server, request, sampling_params=greedy(1000)).started(3).leave()
        elif kind == 3:
            Stream(server, request, sampling_params=greedy(1000, n=2)).started(1).leave()
        elif kind == 4:
            rid = f"abort-{number}"
            body = request.body() | {"rid": rid, "sampling_params": greedy(1000)}
            with ThreadPoolExecutor(1) as threads:
                answer = threads.submit(server.post, "/generate", body)
                server.post("/abort_request", {"rid": rid})
                wait_until(lambda: server.post("/abort_request", {"rid": rid}) and answer.done())
        else:
            response = server.post("/generate", bad[number // 6 % len(bad)])
            assert response.status_code in (BAD_REQUEST, NOT_FOUND), response.text

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(one, number) for number in range(72)]:
            done.result()
    server.settle()


def test_c56_an_unload_returns_exactly_its_bytes(server: Server, folders: dict[str, Path]) -> None:
    for name in NAMES:
        server.ask(Request(name, tiny_model.prompt(300, seed=9)))
    before, row = server.pool(), server.adapter("b")
    answer = unloaded(server, "b")
    after = server.pool()
    pages = row["pages"] + row["kv_pages"]
    assert row["kv_pages"] > 0
    assert answer["freed_pages"] == pages == after["pages"]["free"] - before["pages"]["free"]
    assert answer["freed_bytes"] == pages * before["page_bytes"]
    image = row["weight_pages"] * before["page_bytes"]
    assert after["adapter_host_bytes"] == before["adapter_host_bytes"] - image
    loaded(server, "b", folders["b"])
    assert server.pool()["adapter_host_bytes"] == before["adapter_host_bytes"]


def test_c58_loads_during_generation_change_nothing(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    requests = [Request("a", tiny_model.prompt(60, seed=i), 150) for i in range(8)]
    with asking(server, requests) as answers:
        for _ in range(8):
            loaded(server, "d", folders["d"])
            unloaded(server, "d")
    check(truth, requests, [answer.result() for answer in answers])


def test_c59_a_broken_file_is_an_error_of_its_load_alone(
    server: Server, truth: Reference, folders: dict[str, Path], tmp_path: Path
) -> None:
    lora = {"r": 4, "target_modules": ["q_proj"]}
    whole = (folders["a"] / tiny_adapters.WEIGHTS).read_bytes()
    running = Stream(server, Request(None, SHORT, 200)).started()
    for number, content in enumerate((b"", b"garbage", whole[: len(whole) // 2], bytes(1000))):
        folder = tiny_adapters.save(tmp_path / str(number), lora, seed=1)
        (folder / tiny_adapters.WEIGHTS).write_bytes(content)
        response = server.load("broken", folder)
        assert response.status_code == BAD_REQUEST
        assert response.json()["error_message"]
        assert server.post("/generate", Request("broken", SHORT).body()).status_code == NOT_FOUND
    check(truth, [running.request], [running.result()])


def test_c61_c133_an_unknown_adapter_is_refused_alone_and_in_a_batch(
    server: Server, truth: Reference
) -> None:
    running = Stream(server, Request("a", SHORT, 200)).started()
    bodies = [
        {"input_ids": list(SHORT), "lora_path": "a-typo"},
        {"input_ids": [list(SHORT)] * 2, "lora_path": ["a", "a-typo"]},
    ]
    for body in bodies:
        assert server.post("/generate", body).status_code == NOT_FOUND
    messages = [{"role": "user", "content": "w1"}]
    chat = {"model": "a-typo", "messages": messages, "max_tokens": 2}
    assert server.post("/v1/chat/completions", chat).status_code == NOT_FOUND
    check(truth, [running.request], [running.result()])


def test_c62_of_parallel_unloads_one_succeeds(server: Server, folders: dict[str, Path]) -> None:
    with ThreadPoolExecutor(10) as threads:
        answers = list(threads.map(lambda _: server.unload("a"), range(10)))
    assert sorted(answer.status_code for answer in answers) == [OK] + [BAD_REQUEST] * 9
    refused = [answer for answer in answers if answer.status_code != OK]
    assert all("a is not loaded" in answer.text for answer in refused)
    with ThreadPoolExecutor(10) as threads:
        answers = list(threads.map(lambda _: server.load("a", folders["a"]), range(10)))
    assert sorted(answer.status_code for answer in answers) == [OK] + [BAD_REQUEST] * 9
    assert sum("already loaded" in answer.text for answer in answers) == 9


def test_parallel_replacements_of_one_name_leave_one_adapter(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    versions = ["a", "b", "c", "d"] * 3
    requests = [Request("a", tiny_model.prompt(60, seed=i), 100) for i in range(4)]
    with asking(server, requests) as answers, ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda v: server.replace("a", folders[v]), versions))
    for request, answer in zip(requests, answers, strict=True):
        answered_by(truth, (*NAMES, "d"), request, answer.result())
    server.settle()
    assert [row["name"] for row in server.pool()["adapters"]].count("a") == 1


def test_c67_a_list_of_another_length_is_refused(server: Server) -> None:
    body: dict[str, Any] = {"text": ["w1", "w2", "w3"], "lora_path": ["a", "b"]}
    assert server.post("/generate", body).status_code == BAD_REQUEST
    body["lora_path"] = ["a", "b", "c", "a"]
    assert server.post("/generate", body).status_code == BAD_REQUEST
    assert server.requests()["total"] == 0


@pytest.mark.parametrize("names", [(None, "a"), ("a", None, None), ("b", None, "a", "b")])
def test_c68_a_batch_mixes_adapters_and_the_base_model(
    server: Server, truth: Reference, names: tuple[str | None, ...]
) -> None:
    requests = [Request(name, SHORT) for name in names]
    check(truth, requests, server.ask_batch(requests))


def test_c71_tokens_flow_while_a_large_adapter_is_read(
    server: Server, truth: Reference, tmp_path: Path
) -> None:
    lora = {"r": MAX_RANK, "lora_alpha": 16, "target_modules": list(tiny_adapters.ALL)}
    folder = tiny_adapters.save(tmp_path / "large", lora, seed=4)
    running = Stream(server, Request("a", SHORT, 1500)).started(20)
    gained = 0
    while running.is_running() and gained < 3:
        before = len(running.tokens)
        server.load("large", folder)
        gained = max(gained, len(running.tokens) - before)
        server.unload("large")
    assert gained >= 3, "no token came while the folder was read"
    check(truth, [running.request], [running.result()])


def test_c91_cycles_leave_nothing_behind(server: Server, folders: dict[str, Path]) -> None:
    memory = []
    unloaded(server, "c")
    for cycle in range(120):
        loaded(server, "c", folders["c"])
        server.ask(Request("c", tiny_model.prompt(100, seed=cycle), 4))
        unloaded(server, "c")
        memory.append(scheduler_memory(server))
    pool = server.pool()
    assert (
        pool["adapter_host_bytes"] == 2 * server.adapter("a")["weight_pages"] * pool["page_bytes"]
    )
    assert pool["pages"]["adapter"] == 0
    assert max(memory[60:]) < 1.02 * max(memory[:60])


def test_c131_streamed_text_is_the_adapters(server: Server) -> None:
    messages = [{"role": "user", "content": "w1 w2 w3 w4"}]
    body = {"model": "a", "messages": messages, "temperature": 0, "max_tokens": 12}
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    base = server.post("/v1/chat/completions", body | {"model": BASE}).json()
    assert whole != base["choices"][0]["message"]["content"]
    streamed = server.post("/v1/chat/completions", body | {"stream": True}).text
    assert all(word in streamed for word in whole.split())
    text = server.post("/v1/completions", {"model": "a", "prompt": "w1", "max_tokens": 1})
    assert text.status_code == OK


def test_c134_names_with_colons_are_exact_first(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    loaded(server, "x:y", folders["d"])
    body = {"prompt": list(SHORT), "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    for model, version in (("x:y", "d"), (f"{BASE}:x:y", "d"), (f"{BASE}:a", "a"), (BASE, None)):
        answer = server.post("/v1/completions", body | {"model": model}).json()
        words = answer["choices"][0]["text"].split()
        wanted = truth.answer(version, SHORT, 16).tokens
        assert words == [tiny_model.word(token) for token in wanted], model
    for name in (BASE, "default", ""):
        response = server.load(name, folders["d"])
        assert response.status_code == BAD_REQUEST
        assert "base model" in response.text


def test_c136_the_list_is_exact(server: Server, folders: dict[str, Path]) -> None:
    def listed() -> dict[str, Any]:
        return {card["id"]: card["parent"] for card in server.get("/v1/models").json()["data"]}

    assert listed() == {BASE: None} | dict.fromkeys(NAMES, BASE)
    card = server.get("/v1/models/b").json()
    assert (card["id"], card["parent"]) == ("b", BASE)
    assert server.get(f"/v1/models/{BASE}").json()["id"] == BASE
    unloaded(server, "b")
    assert server.get("/v1/models/b").status_code == NOT_FOUND
    assert listed() == {BASE: None, "a": BASE, "c": BASE}
    server.replace("a", folders["d"])
    assert listed() == {BASE: None, "a": BASE, "c": BASE}


def test_c137_what_is_listed_is_usable(server: Server, tmp_path: Path) -> None:
    lora = {"r": 4, "target_modules": ["q_proj", "embed_tokens"]}
    folder = tiny_adapters.save(tmp_path / "embedding", lora, seed=1)
    response = server.load("embedding", folder)
    assert response.status_code == BAD_REQUEST
    assert "embed_tokens" in response.text
    for card in server.get("/v1/models").json()["data"]:
        answer = server.post("/v1/completions", {"model": card["id"], "prompt": "w1 w2"})
        assert answer.status_code == OK, card


def test_a_client_that_gives_up_on_a_load_leaves_it_whole(
    server: Server, folders: dict[str, Path]
) -> None:
    bodies = [("/load_lora_adapter", {"lora_name": "d", "lora_path": str(folders["d"])})]
    bodies.append(("/unload_lora_adapter", {"lora_name": "a"}))

    def give_up(path: str, body: dict[str, Any]) -> None:
        with server.client.stream("POST", server.url + path, json=body):
            pass  # the body of the answer is never read

    threads = [threading.Thread(target=give_up, args=row) for row in bodies * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: {row["name"] for row in server.pool()["adapters"]} == {"b", "c", "d"})
    assert set(server.requests()["adapters"]) == {"b", "c", "d"}
