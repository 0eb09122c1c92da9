"""Readiness, warm-up, request log and drain of a real server."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_model
from harness import STRICT, Request, Server, running, serve, tail, wait_until
from lifecycle import Stream

pytestmark = pytest.mark.server

OK, UNAVAILABLE = httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE
ADMIN = {"Authorization": "Bearer admin"}
PROMPT = tiny_model.prompt(40, seed=1)
FLAGS = ("--page-size", "16", "--max-total-tokens", "16384", "--admin-api-key", "admin")
STOP_SECONDS = 100.0


@pytest.fixture(scope="module")
def two(adapters: dict[str, Path]) -> dict[str, Path]:
    return {"legal": adapters["all-r16"], "sales": adapters["all-r64"]}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.log"


@pytest.fixture(scope="module")
def server(
    base_model: Path, two: dict[str, Path], log: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = (*FLAGS, "--graft-warm", "all", "--graft-request-log", str(log))
    flags += ("--graft-drain-seconds", "200")
    folder = tmp_path_factory.mktemp("production")
    with serve(base_model, folder, *flags, adapters=two, env=STRICT) as started:
        wait_until(lambda: started.get("/health/ready").status_code == OK)
        yield started


def admin(server: Server, method: str, path: str) -> httpx.Response:
    return server.client.request(method, server.url + path, headers=ADMIN, json={})


def rows(server: Server) -> dict[str, dict[str, Any]]:
    pool = admin(server, "GET", "/graft/pool").json()
    return {row["name"]: row for row in pool["adapters"]}


def line(log: Path, request_id: str) -> dict[str, Any]:
    """The line of one request, once it is written."""
    found: list[dict[str, Any]] = []

    def look() -> bool:
        lines = [json.loads(text) for text in log.read_text().splitlines()]
        found[:] = [one for one in lines if request_id in (one["request_id"], one["id"])]
        return bool(found)

    wait_until(look)
    (one,) = found
    return one


def ask(server: Server, path: str, body: dict[str, Any], request_id: str) -> httpx.Response:
    headers = {"X-Request-Id": request_id}
    answer = server.client.post(server.url + path, json=body, headers=headers)
    assert answer.headers["x-request-id"] == request_id
    return answer


def test_a_ready_server_has_its_adapters_on_the_device(server: Server) -> None:
    found = server.get("/health/ready").json()
    assert found.pop("instance")
    assert found == {
        "ready": True,
        "state": "ready",
        "reason": "requests are welcome",
    }
    assert {name: (row["state"], row["loads"]) for name, row in rows(server).items()} == {
        "legal": ("device", 1),
        "sales": ("device", 1),
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_request_has_one_line(server: Server, log: Path, stream: bool) -> None:
    request_id = f"generate-{stream}"
    body = Request("legal", PROMPT, 7).body() | {"stream": stream}
    before = time.time()
    assert ask(server, "/generate", body, request_id).status_code == OK
    found = line(log, request_id)
    assert found["identity"] == rows(server)["legal"]["identity"]
    assert 0 < found["total_s"] < time.time() - before
    assert 0 < found["ttft_s"] < found["total_s"] if stream else found["ttft_s"] is None
    wanted = {"adapter": "legal", "stream": stream, "finish": "length", "status": 200}
    wanted |= {"prompt_tokens": len(PROMPT), "completion_tokens": 7, "error": None}
    assert wanted.items() <= found.items()
    assert found["cached_tokens"] == (32 if stream else 0)


def test_chat_and_the_base_model_too(server: Server, log: Path) -> None:
    messages = [{"role": "user", "content": "w11 w12 w13"}]
    for model, adapter in (("sales", "sales"), ("default", None)):
        body = {"model": model, "messages": messages, "max_tokens": 3}
        answer = ask(server, "/v1/chat/completions", body, f"chat-{model}").json()
        found = line(log, f"chat-{model}")
        assert (found["adapter"], found["identity"] is None) == (adapter, adapter is None)
        assert found["completion_tokens"] == answer["usage"]["completion_tokens"]
        assert found["id"] == answer["id"]


def test_a_batch_and_samples_have_a_line_each(server: Server, log: Path) -> None:
    body = {"rid": ["batch-1", "batch-2"], "input_ids": [list(PROMPT)] * 2, "lora_path": None}
    server.generate(body | {"sampling_params": {"max_new_tokens": 2}})
    assert line(log, "batch-1")["completion_tokens"] == 2
    assert line(log, "batch-2")["completion_tokens"] == 2
    samples = {"input_ids": list(PROMPT), "rid": "samples", "lora_path": "legal"}
    server.generate(samples | {"sampling_params": {"max_new_tokens": 2, "n": 3}})
    lines = [json.loads(text) for text in log.read_text().splitlines()]
    ours = [one for one in lines if one["parent"] == "samples"]
    # SGLang computes the common prompt first, as a request without new tokens.
    assert sum(one["completion_tokens"] == 2 for one in ours) == 3
    assert len(ours) == 4


def test_errors_have_a_line_with_the_reason(server: Server, log: Path) -> None:
    body = Request("nobody", PROMPT).body()
    assert ask(server, "/generate", body, "unknown").status_code == httpx.codes.NOT_FOUND
    found = line(log, "unknown")
    assert (found["finish"], found["status"], found["adapter"]) == ("error", 404, "nobody")
    assert "Loaded adapters: legal, sales" in found["error"]
    long = {"input_ids": [1] * (tiny_model.CONTEXT + 1), "lora_path": "legal"}
    assert ask(server, "/generate", long, "long").status_code == httpx.codes.BAD_REQUEST
    assert line(log, "long")["status"] == httpx.codes.BAD_REQUEST


def test_a_client_that_leaves_has_a_line(server: Server, log: Path) -> None:
    Stream(server, Request("sales", PROMPT, 1500), rid="left").started(3).leave()
    found = line(log, "left")
    assert (found["adapter"], found["status"]) == ("sales", 499)
    assert 3 <= found["completion_tokens"] < 1500


def test_the_log_has_no_words_of_clients(server: Server, log: Path) -> None:
    body = {"text": "w101 w102", "lora_path": "legal", "sampling_params": {"max_new_tokens": 4}}
    answer = ask(server, "/generate", body, "words").json()
    line(log, "words")
    for word in ("w101", "w102", *answer["text"].split(), "admin"):
        assert word not in log.read_text()


def test_a_paused_server_is_not_ready(server: Server) -> None:
    assert admin(server, "POST", "/pause_generation").status_code == OK
    paused = server.get("/health/ready")
    assert (paused.status_code, paused.json()["state"]) == (UNAVAILABLE, "paused")
    assert admin(server, "POST", "/continue_generation").status_code == OK
    assert server.get("/health/ready").status_code == OK


def test_a_drain_asks_for_the_admin_key(server: Server) -> None:
    assert server.post("/graft/drain").status_code == httpx.codes.UNAUTHORIZED
    assert server.get("/health/ready").status_code == OK


@pytest.fixture(scope="module")
def watch(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[bytes]]:
    """`graft sync --watch` beside the server, as a service of its own."""
    folder = tmp_path_factory.mktemp("watch")
    file = folder / "adapters.yaml"
    file.write_text(
        "adapters:\n  sales: {ttl_seconds: 3600, priority: 2}\n  legal:\naliases: {law: legal}\n"
    )
    line = [sys.executable, "-m", "sglang_graft.cli.app", "sync", str(file), "--watch"]
    line += ["--interval", "0.5", "--url", server.url, "--key", "admin"]
    with running(line, folder / "log") as process:
        yield process
        process.terminate()
        assert process.wait(60) == 0, tail(folder / "log")


def is_synced(server: Server) -> bool:
    listing = admin(server, "GET", "/graft/adapters").json()
    (sales,) = [row for row in listing["adapters"] if row["name"] == "sales"]
    found = (listing["aliases"], sales["ttl_seconds"], sales["priority"])
    return found == ({"law": "legal"}, 3600, 2)


def test_a_watch_brings_what_the_file_wants(server: Server, watch: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: is_synced(server))


def test_sigterm_loses_no_request(server: Server, log: Path) -> None:
    assert server.process is not None
    request = Request("legal", PROMPT, 200)
    streams = [Stream(server, request, rid=f"last-{i}").started() for i in range(3)]
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.get("/health/ready").status_code == UNAVAILABLE)
    assert server.get("/health/ready").json()["state"] == "draining"
    refused = server.post("/generate", request.body())
    assert (refused.status_code, refused.headers["retry-after"]) == (UNAVAILABLE, "5")
    assert "shutting down" in refused.json()["error"]["message"]
    assert server.get("/v1/models").status_code == OK
    assert any(stream.is_running() for stream in streams), "nothing was under way"
    answers = [stream.result()["output_ids"] for stream in streams]
    assert [len(tokens) for tokens in answers] == [200] * 3
    assert server.process.wait(STOP_SECONDS) == 0, tail(server.log)
    assert {line(log, f"last-{i}")["finish"] for i in range(3)} == {"length"}


def test_a_watch_sets_again_what_a_restart_forgets_and_a_drain_is_bounded(
    base_model: Path,
    two: dict[str, Path],
    tmp_path: Path,
    server: Server,
    watch: subprocess.Popen[bytes],
) -> None:
    """Two tests on one server, which starts where the one before has ended."""
    old = server
    assert old.process is not None
    assert old.process.poll() is not None, "the server before has ended"
    flags = (*FLAGS, "--graft-drain-seconds", "10", "--graft-drain-notice-seconds", "9")
    port = int(old.url.rpartition(":")[2])
    with serve(base_model, tmp_path, *flags, adapters=two, env=STRICT, port=port) as server:
        wait_until(lambda: is_synced(server))
        assert watch.poll() is None
        assert server.process is not None
        stream = Stream(server, Request("legal", PROMPT, 2000)).started()
        drained = admin(server, "POST", "/graft/drain")
        assert drained.status_code == httpx.codes.ACCEPTED
        assert drained.json() == {"draining": True, "requests": 1, "seconds": 10.0}
        assert server.get("/health/ready").status_code == UNAVAILABLE
        late = server.ask(Request("sales", PROMPT, 1))
        assert len(late["output_ids"]) == 1, "requests are still taken during the notice"
        stream.join()
        assert stream.tokens
        assert len(stream.tokens) < 2000
        assert server.process.wait(STOP_SECONDS) == 0, tail(server.log)
