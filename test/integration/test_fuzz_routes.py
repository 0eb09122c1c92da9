"""Bad input to every route: 4xx with a reason, never 5xx, and the server answers as before."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_model
from fuzz_bodies import Bodies, Operation, Sent, operations
from harness import STRICT, Request, Server, serve
from hypothesis import HealthCheck, Phase, given, settings
from reference import Reference, check

pytestmark = pytest.mark.server

MESSAGES = [{"role": "user", "content": "w1 w2"}]
SAMPLING = {"temperature": 0, "max_new_tokens": 2}
CHAT = {"model": "a", "messages": MESSAGES, "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# A body that each route answers with 200, which the requests start from.
SEEDS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "w1 w2", "lora_path": "a", "sampling_params": SAMPLING},
    "/encode": {"text": "w1 w2"},
    "/classify": {"text": "w1 w2"},
    "/v1/completions": {"model": "a", "prompt": "w1 w2", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/invocations": CHAT,
    "/v1/embeddings": {"model": "default", "input": "w1"},
    "/v1/classify": {"model": "default", "input": "w1"},
    "/v1/tokenize": {"prompt": "w1 w2"},
    "/v1/detokenize": {"tokens": [1, 2]},
    "/v1/score": {"query": "w1", "items": ["w2"], "label_token_ids": [1], "model": "default"},
    "/v1/responses": {"input": "w1 w2", "model": "default", "max_output_tokens": 2},
    "/v1/rerank": {"query": "w1", "documents": ["w2"]},
    "/api/chat": {"model": "default", "messages": MESSAGES, "options": {"num_predict": 2}},
    "/api/generate": {"model": "default", "prompt": "w1", "options": {"num_predict": 2}},
    "/api/show": {"model": "default"},
    "/v1/messages": {"model": "a", "messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "a", "messages": MESSAGES},
    "/vertex_generate": {
        "instances": [{"text": "w1 w2"}],
        "parameters": {"sampling_params": SAMPLING, "lora_path": "a"},
    },
    "/parse_function_call": {"text": "w1", "tools": [TOOL], "tool_call_parser": "qwen25"},
    "/separate_reasoning": {"text": "w1", "reasoning_parser": "qwen3"},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "nowhere"},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "nowhere"},
    "/unload_lora_adapter": {"lora_name": "nobody"},
    "/v1/unload_lora_adapter": {"lora_name": "nobody"},
    "/set_internal_state": {"server_args": {"pp_max_micro_batch_size": 8}},
    "/open_session": {"capacity_of_str_len": 10},
    "/close_session": {"session_id": "x"},
    "/abort_request": {"rid": "nobody"},
    "/pause_generation": {"mode": "abort"},
    "/update_weight_version": {"new_version": "x"},
    "/get_weights_by_name": {"name": "model.norm.weight"},
    "/weights_checker": {"action": "snapshot"},
}

# Seeds that this server has to refuse, and its words.
_EMBEDS = "--is-embedding"
REFUSED = {
    "/encode": _EMBEDS,
    "/classify": _EMBEDS,
    "/v1/embeddings": _EMBEDS,
    "/v1/classify": _EMBEDS,
    "/v1/rerank": _EMBEDS,
    "/load_lora_adapter": "is not a folder",
    "/v1/load_lora_adapter": "already been loaded",
    "/unload_lora_adapter": "not loaded",
}

_PEER = "waits for another process to connect, in the scheduler"
_WEIGHTS = "gives the base model other weights; no answer could be checked afterwards"
_FILES = "writes to folders that the body names"
# Not made bad bodies for, as one might be good, and why. Everything else is.
EXCLUDED = {
    "/init_weights_send_group_for_remote_instance": _PEER,
    "/send_weights_to_remote_instance": _PEER,
    "/init_weights_update_group": _PEER,
    "/destroy_weights_update_group": _PEER,
    "/update_weights_from_distributed": _PEER,
    "/update_weights_from_ipc": _PEER,
    "/update_weights_from_tensor": _WEIGHTS,
    "/update_weights_from_disk": _WEIGHTS,
    "/slow_down": "makes every later pass of the scheduler sleep",
    "/start_profile": _FILES,
    "/configure_logging": _FILES,
    "/graft/drain": "ends the server",
}
# Undone after each request: what would change the next one.
UNDO = {"/pause_generation": "/continue_generation"}

EXAMPLES = 12
MORE = {"/generate": 60, "/v1/chat/completions": 40, "/v1/completions": 40, "/v1/messages": 25}

FLAGS = ("--page-size", "16", "--max-total-tokens", "8192", "--context-length", "128")


def send(server: Server, operation: Operation, sent: Sent) -> httpx.Response:
    """The answer to one request."""
    query = {key: _text(value) for key, value in sent.query.items()}
    more: dict[str, Any] = {}
    if operation.is_form:
        fields = sent.body if isinstance(sent.body, dict) else {}
        more["files"] = {key: (None, _text(value)) for key, value in fields.items()}
    elif operation.body is not None:
        more["content"] = json.dumps(sent.body).encode() if sent.raw is None else sent.raw
        more["headers"] = {"Content-Type": "application/json"}
    return server.client.request(
        operation.method, server.url + sent.path, params=query, timeout=60, **more
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.fixture(scope="module")
def server(
    base_model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    given = {"a": adapters["all-r16"]}
    folder = tmp_path_factory.mktemp("server")
    logged = (
        *("Error getting weights by name", "check_weights see error"),
        *("Error in preprocessing prompt inputs", "Error converting", "Error in request"),
        *("Error during tokenization", "Error during detokenization"),
    )
    with serve(base_model, folder, *FLAGS, adapters=given, env=STRICT, may_fail=logged) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/openapi.json").json()
    return found


def test_every_operation_gets_bad_input(server: Server, document: dict[str, Any]) -> None:
    """One test for all: the operations are known once the server runs."""
    bodies, wrong = Bodies(document), []
    listed = operations(document)
    assert {operation.path for operation in listed} >= {*SEEDS, *EXCLUDED} - {"/tokenize"}
    for operation in listed:
        if operation.path in EXCLUDED:
            continue
        found = _problems(server, operation, bodies)
        if not _is_well(server):
            found.append(f"{operation.name}: the server does not answer any more")
        wrong += found
    assert not wrong, "\n".join(wrong)


def _problems(server: Server, operation: Operation, bodies: Bodies) -> list[str]:
    """What was answered with 5xx, or with 4xx and no reason."""
    wrong: list[str] = []

    @settings(
        max_examples=MORE.get(operation.path, EXAMPLES),
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(sent=bodies.requests(operation, SEEDS.get(operation.path, {})))
    def run(sent: Sent) -> None:
        response = send(server, operation, sent)
        if operation.path in UNDO:
            server.post(UNDO[operation.path])
        reason = response.text.strip()
        if response.status_code >= 500 or (response.status_code >= 400 and not reason):
            wrong.append(f"{operation.name}: {response.status_code} {reason[:200]} for {sent}")

    run()
    return wrong


def _is_well(server: Server) -> bool:
    body = {"text": "w1", "lora_path": "a", "sampling_params": SAMPLING}
    return server.post("/generate", body).status_code == httpx.codes.OK


@pytest.mark.parametrize("path", sorted({*SEEDS} - {"/open_session"}))
def test_the_bodies_that_bad_ones_are_made_of_are_good(server: Server, path: str) -> None:
    """Or else all that is made of them would fail at the first check."""
    response = server.post(path, SEEDS[path])
    if path in UNDO:
        server.post(UNDO[path])
    refused = REFUSED.get(path)
    assert response.status_code == httpx.codes.OK or (refused and refused in response.text), (
        path,
        response.text,
    )


# `/start_profile` and `/graft/drain` need no body, so any request of theirs is a good one.
@pytest.mark.parametrize("path", sorted({*EXCLUDED} - {"/start_profile", "/graft/drain"}))
@pytest.mark.parametrize("body", [b"{", b"3", b'"text"', b"[[1]]", b"\xff"], ids=repr)
def test_a_route_that_is_not_fuzzed_refuses_what_is_no_object(
    server: Server, path: str, body: bytes
) -> None:
    headers = {"Content-Type": "application/json"}
    response = server.client.post(server.url + path, content=body, headers=headers)
    assert response.status_code in (400, 422), (path, response.status_code, response.text)
    assert response.text.strip()


# What a fuzzer does not guess. Each ended the scheduler, or the HTTP process, of stock SGLang.
KILLERS: dict[str, dict[str, Any]] = {
    "samples": {"sampling_params": {"n": 10**9}},
    "top_k": {"sampling_params": {"top_k": 2**40}},
    "seed": {"sampling_params": {"sampling_seed": 2**70}},
    "stream interval": {"stream": True, "sampling_params": {"stream_interval": -1}},
    "repetition penalty": {"sampling_params": {"repetition_penalty": 1e-300}},
    "logit bias": {"sampling_params": {"logit_bias": {"1": 1e300, "2": 1e300}}},
    "stop tokens": {"sampling_params": {"stop_token_ids": [10**9], "min_new_tokens": 1}},
    "normalized": {"sampling_params": {"is_normalized": True, "stop": "w1"}},
    "type of a limit": {"sampling_params": {"max_new_tokens": "3"}},
    "type of a flag": {"sampling_params": {"ignore_eos": []}},
    "logprobs": {"return_logprob": True, "top_logprobs_num": 10**6},
    "logprobs below": {"return_logprob": True, "top_logprobs_num": -1},
    "start of logprobs": {"return_logprob": True, "logprob_start_len": -7},
    "session": {"session_params": {"id": [1]}},
    "embeddings": {"positional_embed_overrides": [[1]]},
}


@pytest.mark.parametrize("kind", KILLERS)
def test_what_would_end_the_scheduler_is_400(server: Server, kind: str) -> None:
    body = SEEDS["/generate"] | KILLERS[kind]
    response = server.post("/generate", body)
    refused = response.status_code == httpx.codes.BAD_REQUEST or '"code":400' in response.text
    assert refused, response.text
    assert _is_well(server)


def test_a_client_cannot_choose_the_id_of_an_adapter(server: Server) -> None:
    body = {"text": "w1", "sampling_params": SAMPLING, "lora_id": "nobody"}
    assert server.generate(body)["meta_info"]["adapter"] is None


def test_the_server_answers_as_before(server: Server, reference: Reference) -> None:
    """Last: after all of the above."""
    server.settle()
    prompt = tiny_model.prompt(40, seed=3)
    asked = [Request(name, prompt, 16) for name in (None, "a")]
    truth = [Request(kind, prompt, 16) for kind in (None, "all-r16")]
    check(reference, truth, server.ask_all(asked, 2))
    server.flush()
    pool = server.pool()
    assert pool["pages"]["free"] == pool["pages"]["total"]
