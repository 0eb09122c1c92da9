"""A server with every kind of adapter answers exactly as transformers and PEFT do."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_adapters
import tiny_model
from harness import Request, Server, greedy, serve, wait_until
from reference import Reference, check

pytestmark = pytest.mark.server

LENGTHS = (3, 40, 150, 300)
NAMES = (None, *tiny_adapters.KINDS)
PROMPTS = {length: tiny_model.prompt(length, seed=length) for length in LENGTHS}
IN_FLIGHT = 16
NOT_FOUND = 404
BAD_REQUEST = 400


@pytest.fixture(scope="module")
def server(
    base_model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = (
        "--served-model-name",
        "served",
        "--enable-cache-report",
        "--max-total-tokens",
        "32768",
    )
    folder = tmp_path_factory.mktemp("server")
    env = {"GRAFT_CHECK": "1"}
    with serve(base_model, folder, *flags, adapters=adapters, env=env) as running:
        yield running


def requests_for(adapter: str | None) -> list[Request]:
    return [Request(adapter, prompt) for prompt in PROMPTS.values()]


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["meta_info"]["cached_tokens"] for answer in answers]


def whole_pages(server: Server) -> list[int]:
    """What a second request finds cached; at least one token is always computed."""
    size = server.pool()["page_tokens"]
    return [(length - 1) // size * size for length in LENGTHS]


@pytest.mark.parametrize("adapter", NAMES)
def test_alone_cold_and_on_prefix_hits(
    server: Server, reference: Reference, adapter: str | None
) -> None:
    server.flush()
    requests = requests_for(adapter)
    first = [server.ask(request) for request in requests]
    check(reference, requests, first)
    assert cached(first) == [0] * len(LENGTHS)
    second = [server.ask(request) for request in requests]
    check(reference, requests, second)
    assert cached(second) == whole_pages(server)


def test_a_penalty_counts_each_token_once_alone_and_beside_others(server: Server) -> None:
    """Alone a first token goes out before the next step is made; that must not count it again."""

    def answers() -> list[list[int]]:
        sampling = greedy(24, frequency_penalty=2.0)
        bodies = [
            {"input_ids": PROMPTS[length], "lora_path": name, "sampling_params": sampling}
            for length in LENGTHS
            for name in NAMES[:2]
        ]
        return [server.generate(body)["output_ids"] for body in bodies]

    alone = answers()
    server.flush()
    with ThreadPoolExecutor(1) as threads:
        body = Request(None, PROMPTS[40], new_tokens=1500).body() | {"rid": "long"}
        long = threads.submit(server.post, "/generate", body)
        wait_until(lambda: server.pool()["pages"]["kv_running"] > 0)
        beside = answers()
        assert not long.done()
        server.post("/abort_request", {"rid": "long"})
    assert beside == alone


def test_mixed_batch_cold_and_on_prefix_hits(server: Server, reference: Reference) -> None:
    server.flush()
    requests = [request for adapter in NAMES for request in requests_for(adapter)]
    check(reference, requests, server.ask_all(requests, IN_FLIGHT))
    second = server.ask_all(requests, IN_FLIGHT)
    check(reference, requests, second)
    assert cached(second) == whole_pages(server) * len(NAMES)


def test_every_adapter_changes_the_answer(reference: Reference) -> None:
    for prompt in PROMPTS.values():
        answers = [tuple(reference.answer(name, prompt, 16).tokens) for name in NAMES]
        assert len(set(answers)) == len(NAMES)


def test_a_continued_conversation_reuses_the_answer(server: Server, reference: Reference) -> None:
    server.flush()
    first = Request("all-r16", PROMPTS[150], new_tokens=60)
    answer = server.ask(first)
    longer = Request("all-r16", (*first.prompt, *answer["output_ids"], 1, 2, 3))
    second = server.ask(longer)
    check(reference, [first, longer], [answer, second])
    size = server.pool()["page_tokens"]
    # The last token of the first answer was never fed to the model.
    assert second["meta_info"]["cached_tokens"] == (150 + 60 - 1) // size * size


def test_a_batch_request_names_an_adapter_for_each_prompt(
    server: Server, reference: Reference
) -> None:
    requests = [Request(name, PROMPTS[40]) for name in (None, "all-r64", "q-r4", None, "fp16")]
    check(reference, requests, server.ask_batch(requests))


def test_two_samples_at_temperature_0_are_the_same_answer(
    server: Server, reference: Reference, adapters: dict[str, Path]
) -> None:
    for request in (Request("patterns", PROMPTS[150]), Request(None, PROMPTS[40])):
        body = request.body() | {"sampling_params": greedy(16, n=2)}
        check(reference, [request, request], server.generate(body))
    assert server.unload("patterns").status_code == 200
    assert server.load("patterns", adapters["patterns"]).status_code == 200


def test_a_regular_expression_binds_the_answer(server: Server) -> None:
    # The tiny tokenizer's words carry no space, so a grammar sees them joined.
    limited = greedy(8) | {"regex": "(w5|w7)+"}
    answer = server.generate(Request("q-r4", PROMPTS[40]).body() | {"sampling_params": limited})
    assert set(answer["output_ids"]) <= {5, 7}


@pytest.mark.parametrize("model", ["rslora-r8", "served:rslora-r8"])
def test_openai_completions(server: Server, reference: Reference, model: str) -> None:
    prompt = PROMPTS[40]
    body = {"model": model, "prompt": list(prompt), "temperature": 0, "max_tokens": 16}
    response = server.post("/v1/completions", body | {"ignore_eos": True})
    words = response.json()["choices"][0]["text"].split()
    wanted = reference.answer("rslora-r8", prompt, 16)
    assert words == [tiny_model.word(token) for token in wanted.tokens]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [1, 2], "lora_path": "nobody"}),
        ("/generate", {"input_ids": [[1], [2]], "lora_path": ["q-r4", "nobody"]}),
        ("/generate", {"input_ids": [1], "lora_path": "nobody", "stream": True}),
        ("/v1/completions", {"prompt": "w1 w2", "model": "nobody"}),
        ("/v1/completions", {"prompt": "w1 w2", "model": "nobody", "stream": True}),
        ("/v1/completions", {"prompt": "w1 w2", "model": "default", "lora_path": "nobody"}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "w1"}], "model": "nobody"},
        ),
    ],
)
def test_an_unknown_adapter_is_not_found(server: Server, path: str, body: dict[str, Any]) -> None:
    response = server.post(path, body)
    assert response.status_code == NOT_FOUND
    assert "'nobody'" in response.text
    assert ", ".join(sorted(tiny_adapters.KINDS)) in response.text


def test_a_name_is_loaded_once(server: Server, adapters: dict[str, Path]) -> None:
    response = server.load("q-r4", adapters["bf16"])
    assert response.status_code == BAD_REQUEST
    assert "q-r4" in response.text
    assert "already loaded" in response.text


def test_unload_and_load_again(
    server: Server, reference: Reference, adapters: dict[str, Path]
) -> None:
    requests = requests_for("down-r16")
    check(reference, requests, [server.ask(request) for request in requests])
    before = server.pool()["pages"]
    unloaded = server.unload("down-r16")
    assert unloaded.status_code == 200, unloaded.text
    after = server.pool()
    assert "down-r16" not in [adapter["name"] for adapter in after["adapters"]]
    assert after["pages"]["adapter"] < before["adapter"]
    assert after["pages"]["kv_cached"] < before["kv_cached"]
    assert server.post("/generate", requests[0].body()).status_code == NOT_FOUND
    loaded = server.load("down-r16", adapters["down-r16"])
    assert loaded.status_code == 200, loaded.text
    check(reference, requests, [server.ask(request) for request in requests])


def test_new_weights_under_an_old_name_do_not_find_the_old_kv(
    server: Server, reference: Reference, adapters: dict[str, Path]
) -> None:
    request = Request("up-r8", PROMPTS[300])
    server.ask(request)
    assert server.unload("up-r8").status_code == 200
    assert server.load("up-r8", adapters["all-r16"]).status_code == 200
    answer = server.ask(request)
    check(reference, [Request("all-r16", request.prompt)], [answer])
    assert server.unload("up-r8").status_code == 200
    assert server.load("up-r8", adapters["up-r8"]).status_code == 200
    check(reference, [request], [server.ask(request)])


def test_equal_weights_under_two_names_share_pages_and_kv(
    server: Server, reference: Reference, adapters: dict[str, Path], tmp_path: Path
) -> None:
    server.flush()
    server.ask(Request("fp16", PROMPTS[300]))
    pages = server.pool()["pages"]["adapter"]
    twin = shutil.copytree(adapters["fp16"], tmp_path / "twin")
    assert server.load("twin", twin).status_code == 200
    answer = server.ask(Request("twin", PROMPTS[300]))
    check(reference, [Request("fp16", PROMPTS[300])], [answer])
    assert answer["meta_info"]["cached_tokens"] == whole_pages(server)[-1]
    assert server.pool()["pages"]["adapter"] == pages
    assert server.unload("twin").status_code == 200
    answer = server.ask(Request("fp16", PROMPTS[300]))
    assert answer["meta_info"]["cached_tokens"] == whole_pages(server)[-1]


def locks(server: Server, name: str) -> int:
    held: int = next(a["locks"] for a in server.pool()["adapters"] if a["name"] == name)
    return held


def broken(kind: str, folder: Path) -> Path:
    lora: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"]}
    if kind == "bias":
        lora["bias"] = "all"
    tiny_adapters.save(folder, lora, seed=7)
    if kind == "shape":
        tiny_adapters.edit_tensors(folder, lambda name, t: t[:, :-8] if "lora_A" in name else t)
    return folder


@pytest.mark.parametrize(("kind", "reason"), [("bias", "trained biases"), ("shape", "[4, 96]")])
def test_a_broken_adapter_is_refused_and_others_go_on(
    server: Server, reference: Reference, tmp_path: Path, kind: str, reason: str
) -> None:
    response = server.load("broken", broken(kind, tmp_path / "broken"))
    assert response.status_code == BAD_REQUEST
    assert reason in response.text
    assert server.post("/generate", {"input_ids": [1], "lora_path": "broken"}).status_code == 404
    requests = [Request(name, PROMPTS[40]) for name in NAMES]
    check(reference, requests, server.ask_all(requests, IN_FLIGHT))


def test_requests_end_in_order_when_their_adapter_is_unloaded(
    server: Server, reference: Reference, adapters: dict[str, Path]
) -> None:
    requests = [Request("qv-r8", prompt, new_tokens=48) for prompt in PROMPTS.values()]
    with ThreadPoolExecutor(len(requests)) as threads:
        answers = [threads.submit(server.ask, request) for request in requests]
        wait_until(lambda: locks(server, "qv-r8") > 0)
        assert server.unload("qv-r8").status_code == 200
    check(reference, requests, [answer.result() for answer in answers])
    assert server.load("qv-r8", adapters["qv-r8"]).status_code == 200


def test_a_client_that_leaves_gives_its_pages_back(
    server: Server, adapters: dict[str, Path]
) -> None:
    body = Request("all-r64", PROMPTS[300], new_tokens=1500).body() | {"stream": True}
    with server.client.stream("POST", server.url + "/generate", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert locks(server, "all-r64") > 0
    wait_until(lambda: locks(server, "all-r64") == 0)
    assert server.pool()["pages"]["kv_running"] == 0
    assert server.unload("all-r64").status_code == 200
    assert server.load("all-r64", adapters["all-r64"]).status_code == 200


def test_server_info_carries_the_pool_report(server: Server) -> None:
    def is_the_same() -> bool:
        (state,) = server.get("/server_info").json()["internal_states"]
        return bool(state["graft"] == server.pool())

    # An image may come to host memory between the two questions.
    wait_until(is_the_same)


def test_nothing_is_left_after_a_flush(server: Server) -> None:
    server.flush()
    pages = server.pool()["pages"]
    assert pages["free"] == pages["total"]
