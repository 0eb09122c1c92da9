"""Start a real server as a user does, ask it, and always stop it with all of its children."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang_graft.bench.process import free_port, stop

HOST = "127.0.0.1"
START_SECONDS = 300.0
STOP_SECONDS = 20.0
ANSWER_SECONDS = 300.0
# A connection for each request. httpx may close a kept one, whose time is over, in one thread just
# when another has taken it ("Bad file descriptor"); and the server closes them after five seconds.
ONE_REQUEST = httpx.Limits(max_keepalive_connections=0)
LOG_LINES = 60

# Every check that SGLang and Graft have, after every step.
STRICT = {
    "GRAFT_CHECK": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """One greedy completion; `adapter` None is the base model.

    `logprobs` asks for those of every token, of the prompt too.
    """

    adapter: str | None
    prompt: Prompt
    new_tokens: int = 16
    logprobs: bool = False

    def body(self) -> dict[str, Any]:
        """The JSON of POST /generate."""
        more = {"return_logprob": True, "logprob_start_len": 0} if self.logprobs else {}
        return {
            "input_ids": list(self.prompt),
            "lora_path": self.adapter,
            "sampling_params": greedy(self.new_tokens),
            **more,
        }


def greedy(new_tokens: int, **more: Any) -> dict[str, Any]:
    """Sampling parameters that leave nothing to chance and never stop early."""
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, **more}


@dataclass
class Server:
    """A running server, and how to ask it."""

    url: str
    log: Path
    flags: tuple[str, ...]
    client: httpx.Client
    pid: int = 0
    process: subprocess.Popen[bytes] | None = None

    def get(self, path: str) -> httpx.Response:
        """GET, whatever the status."""
        return self.client.get(self.url + path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """POST of JSON, whatever the status."""
        return self.client.post(self.url + path, json=body or {})

    def pool(self) -> dict[str, Any]:
        """The report of /graft/pool."""
        response = self.get("/graft/pool")
        assert response.status_code == httpx.codes.OK, response.text
        report: dict[str, Any] = response.json()
        return report

    def generate(self, body: dict[str, Any]) -> Any:
        """POST /generate, which must succeed: one object, or a list of them for a batch."""
        response = self.post("/generate", body)
        assert response.status_code == httpx.codes.OK, response.text
        return response.json()

    def ask(self, request: Request) -> dict[str, Any]:
        """Answer of one request: `output_ids`, `meta_info` and more."""
        answer: dict[str, Any] = self.generate(request.body())
        return answer

    def ask_batch(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Answers of one HTTP request that carries all of `requests`."""
        bodies = [request.body() for request in requests]
        answers: list[dict[str, Any]] = self.generate(
            {key: [body[key] for body in bodies] for key in bodies[0]}
        )
        return answers

    def ask_all(self, requests: Sequence[Request], in_flight: int) -> list[dict[str, Any]]:
        """Answers in the order of `requests`, with up to `in_flight` of them under way."""
        with ThreadPoolExecutor(in_flight) as threads:
            return list(threads.map(self.ask, requests))

    def load(self, name: str, folder: Path, **more: Any) -> httpx.Response:
        """Load an adapter; whether it worked is the caller's to look at."""
        body = {"lora_name": name, "lora_path": str(folder), **more}
        return self.post("/load_lora_adapter", body)

    def replace(self, name: str, folder: Path, **more: Any) -> dict[str, Any]:
        """Replace an adapter in place, which must succeed; the answer says what that freed."""
        response = self.load(name, folder, load_inplace=True, **more)
        assert response.status_code == httpx.codes.OK, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def unload(self, name: str) -> httpx.Response:
        """Unload an adapter."""
        return self.post("/unload_lora_adapter", {"lora_name": name})

    def adapter(self, name: str) -> dict[str, Any]:
        """One adapter's row in the report of /graft/pool."""
        row: dict[str, Any] = next(a for a in self.pool()["adapters"] if a["name"] == name)
        return row

    def requests(self) -> dict[str, Any]:
        """The report of /graft/requests."""
        response = self.get("/graft/requests")
        assert response.status_code == httpx.codes.OK, response.text
        report: dict[str, Any] = response.json()
        return report

    def settle(self) -> None:
        """Wait until no request is left anywhere; then nothing may hold anything."""
        wait_until(lambda: self.requests()["total"] == 0 and not self.requests()["retired"])
        wait_until(lambda: self.pool()["pages"]["kv_running"] == 0)
        pool, requests = self.pool(), self.requests()
        assert set(requests["adapters"].values()) <= {0}, requests
        assert all(row["locks"] == 0 for row in (pool["base"], *pool["adapters"])), pool
        assert not pool["retired"], pool

    def flush(self) -> None:
        """Empty the pool; the server must be idle."""
        response = self.post("/flush_cache")
        assert response.status_code == httpx.codes.OK, response.text


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment without Graft's own variables, and with `changes`."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GRAFT_")}
    # Compiling all of SGLang anew in each of a server's processes takes longer than the tests.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    # More threads only wait for each other on matrices as small as the tiny model's.
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | dict(changes or {})


@contextmanager
def serve(
    model: Path,
    folder: Path,
    *flags: str,
    adapters: Mapping[str, Path] | None = None,
    env: Mapping[str, str] | None = None,
    graft: bool = True,
    may_fail: Sequence[str] = (),
    port: int | None = None,
) -> Iterator[Server]:
    """Run a server until the block ends; its log lies in `folder` and must show no traceback.

    `may_fail`: texts by which SGLang introduces the traceback of an error that it answers well.
    """
    port = free_port() if port is None else port
    line = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    line += ["--host", HOST, "--port", str(port), *flags]
    if graft:
        line.append("--enable-graft")
    if adapters:
        line += ["--lora-paths", *(f"{name}={path}" for name, path in adapters.items())]
    log = folder / "server.log"
    client = httpx.Client(timeout=ANSWER_SECONDS, limits=ONE_REQUEST)
    with running(line, log, env) as process, client:
        server = Server(f"http://{HOST}:{port}", log, flags, client, process.pid, process)
        _wait_healthy(server, process)
        yield server
    lines = log.read_text(errors="replace").splitlines()
    for at, text in enumerate(lines):
        if "Traceback" not in text:
            continue
        begin = at
        while begin and not lines[begin].startswith("["):  # the time of a record of the log
            begin -= 1
        if not any(text in "\n".join(lines[begin : at + 1]) for text in may_fail):
            raise AssertionError("\n".join(lines[max(0, begin - 3) : at + LOG_LINES]))


@contextmanager
def running(
    line: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group of its own, which is ended in every case."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            line,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(env),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop(process, limit_s=STOP_SECONDS)


def tail(log: Path) -> str:
    """The end of a log, for the message of a failed assertion."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"end of {log}:", *lines])


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until `condition` holds; fail when it does not in good time."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def _wait_healthy(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _is_healthy(server):
        code = process.poll()
        assert code is None, f"the server ended with code {code}\n{tail(server.log)}"
        assert time.monotonic() < deadline, f"the server is not ready\n{tail(server.log)}"
        time.sleep(0.5)


def _is_healthy(server: Server) -> bool:
    try:
        return server.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False  # not listening yet
