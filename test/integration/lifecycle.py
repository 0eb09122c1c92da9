"""What the tests of loading, replacing and unloading share."""

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import tiny_adapters
from harness import Request, Server, tail, wait_until
from reference import Reference, difference

OK, BAD_REQUEST, NOT_FOUND = 200, 400, 404
ALL_LINEARS = list(tiny_adapters.ALL)


def save_versions(folder: Path, names: Sequence[str], rank: int = 8) -> dict[str, Path]:
    """Adapters that touch every linear, each with weights of its own."""
    lora = {"r": rank, "lora_alpha": 16, "target_modules": ALL_LINEARS}
    return {
        name: tiny_adapters.save(folder / name, lora, seed=300 + number)
        for number, name in enumerate(names)
    }


def loaded(server: Server, name: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Load an adapter, which must succeed."""
    response = server.load(name, folder, **more)
    assert response.status_code == OK, response.text
    answer: dict[str, Any] = response.json()
    return answer


def unloaded(server: Server, name: str) -> dict[str, Any]:
    """Unload an adapter, which must succeed."""
    response = server.unload(name)
    assert response.status_code == OK, response.text
    answer: dict[str, Any] = response.json()
    return answer


class Stream:
    """A request whose tokens come one by one, in a thread of its own."""

    def __init__(self, server: Server, request: Request, **more: Any) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.status_code = 0
        self.error: dict[str, Any] | None = None
        self._server = server
        self._body = request.body() | {"stream": True} | more
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def started(self, tokens: int = 1) -> "Stream":
        """Wait until this many tokens have come."""
        wait_until(lambda: len(self.tokens) >= tokens or not self.is_running())
        assert len(self.tokens) >= tokens, self.error
        return self

    def leave(self) -> None:
        """Close the connection in the middle."""
        self._leave.set()
        self._thread.join()

    def is_running(self) -> bool:
        """Whether the answer has not ended."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end, whatever it is."""
        self._thread.join()

    def result(self) -> dict[str, Any]:
        """Wait for the end; an answer like that of `Server.ask`."""
        self.join()
        assert self.error is None, self.error
        return {"output_ids": list(self.tokens)}

    def _run(self) -> None:
        url = self._server.url + "/generate"
        with self._server.client.stream("POST", url, json=self._body) as response:
            self.status_code = response.status_code
            for line in response.iter_lines():
                text = line.removeprefix("data: ")
                if text.startswith("{"):
                    event = json.loads(text)
                    self.error = event.get("error")
                    if self.error is not None:
                        self.status_code = self.error["code"]
                    self.tokens = event.get("output_ids", self.tokens)
                if self._leave.is_set():
                    return


@contextmanager
def asking(server: Server, requests: Sequence[Request]) -> Iterator[list["Future[dict[str, Any]]"]]:
    """All requests under way while the block runs; it ends when they have."""
    with ThreadPoolExecutor(max(len(requests), 1)) as threads:
        yield [threads.submit(server.ask, request) for request in requests]


def scheduler_memory(server: Server) -> int:
    """Resident bytes of the scheduler process."""
    # Direct children only: what the scheduler forks has its name until it is another program.
    children = psutil.Process(server.pid).children()
    (scheduler,) = [p for p in children if p.name().startswith("sglang::schedul")]
    assert scheduler.status() != psutil.STATUS_ZOMBIE, tail(server.log)
    return int(scheduler.memory_info().rss)


def cached(answer: dict[str, Any]) -> int:
    """Prompt tokens that came from the cache."""
    return int(answer["meta_info"]["cached_tokens"])


def answered_by(
    truth: Reference, versions: Sequence[str], request: Request, answer: dict[str, Any]
) -> str:
    """The weights, out of `versions`, whose reference answer this is."""
    for version in versions:
        wanted = truth.answer(version, request.prompt, request.new_tokens)
        if difference(answer["output_ids"], wanted) is None:
            return version
    raise AssertionError(f"the answer to {request.adapter} is nobody's: {answer['output_ids']}")
