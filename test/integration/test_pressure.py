"""A pool so small that adapters and KV keep pushing each other out: every answer stays right."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import tiny_adapters
import tiny_model
from harness import STRICT, Request, Server, serve
from reference import Reference, check

pytestmark = pytest.mark.server

PAGE_TOKENS = 16
POOL_PAGES = 136
# 12 to 36 pages each, 183 together: about three fit beside the KV of eight running requests.
RANKS = {"a": 8, "b": 12, "c": 16, "d": 16, "e": 20, "f": 24, "g": 12, "h": 16}
BIG = {"big": 64}  # 94 pages
TOO_BIG = {"too-big": 128}  # 188 pages
REQUESTS = 200
IN_FLIGHT = 8
OWNERS = ("free", "adapter", "kv_cached", "kv_running", "in_flight")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return tiny_adapters.save_ranks(folder, RANKS | BIG | TOO_BIG)


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path]) -> Reference:
    return Reference(tiny_model.new_model(), {name: folders[name] for name in RANKS | BIG})


@pytest.fixture(scope="module")
def server(
    base_model: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ["--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(POOL_PAGES * PAGE_TOKENS)]
    # SGLang then admits requests whose answers will not all fit, and has to retract some.
    flags += ["--schedule-conservativeness", "0.1"]
    adapters = {name: folders[name] for name in RANKS}
    folder = tmp_path_factory.mktemp("server")
    with serve(base_model, folder, *flags, adapters=adapters, env=STRICT) as running:
        yield running


class Sampler:
    """Looks at the pool again and again while a block runs, and checks every sample."""

    def __init__(self, server: Server) -> None:
        self.samples: list[dict[str, Any]] = []
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        for sample in self.samples:
            check_sample(sample)

    def _run(self) -> None:
        while not self._ended.wait(0.05):
            self.samples.append(self._server.pool())


def check_sample(sample: dict[str, Any]) -> None:
    pages = sample["pages"]
    assert sample["invalid_kv_pages"] == 0
    assert sum(pages[owner] for owner in OWNERS) == pages["total"] == POOL_PAGES, pages
    for adapter in sample["adapters"]:
        held = adapter["pages"] or adapter["kv_pages"] or adapter["locks"]
        assert adapter["state"] != "host" or not held, adapter


def mixed_requests() -> list[Request]:
    """Some adapters and prompts far more often than others, prompts with common beginnings."""
    source = random.Random(5)
    names = source.choices([None, *RANKS], weights=[4, 8, 6, 4, 3, 3, 2, 2, 2], k=REQUESTS)
    lengths = source.choices([20, 50, 100], k=REQUESTS)
    seeds = source.choices(range(4), k=REQUESTS)
    return [
        Request(name, tiny_model.prompt(length, seed))
        for name, length, seed in zip(names, lengths, seeds, strict=True)
    ]


def long_requests(name: str) -> list[Request]:
    return [Request(name, tiny_model.prompt(240, seed=50 + i)) for i in range(8)]


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {adapter["name"]: adapter for adapter in report["adapters"]}


def flushed(server: Server) -> None:
    server.flush()
    pages = server.pool()["pages"]
    assert pages["free"] == pages["total"]


def test_mixed_requests_under_pressure(server: Server, truth: Reference) -> None:
    requests = mixed_requests()
    with Sampler(server) as sampler:
        answers = server.ask_all(requests, IN_FLIGHT)
    check(truth, requests, answers)
    assert len(sampler.samples) > 20
    came_back = [a for a in by_name(server.pool()).values() if a["loads"] > 1 and a["evictions"]]
    assert len(came_back) >= 6
    assert any(sample["pages"]["free"] < POOL_PAGES // 8 for sample in sampler.samples)
    flushed(server)


def test_long_answers_outgrow_the_pool(server: Server, truth: Reference) -> None:
    requests = [
        Request(name, tiny_model.prompt(20, seed=80 + i), new_tokens=110)
        for i, name in enumerate(["a", "b", None, "c"] * 3)
    ]
    with Sampler(server):
        answers = server.ask_batch(requests)
    check(truth, requests, answers)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    flushed(server)


def test_kv_and_adapters_borrow_from_each_other(server: Server, truth: Reference) -> None:
    server.flush()
    long, others = (
        long_requests("a"),
        [Request(n, tiny_model.prompt(20)) for n in RANKS if n != "a"],
    )
    with Sampler(server):
        check(truth, long, [server.ask(request) for request in long])
        full = server.pool()
        check(truth, others, [server.ask(request) for request in others])
        shared = server.pool()
        check(truth, long, [server.ask(request) for request in long])
        again = server.pool()
    only_a = by_name(full)["a"]
    assert only_a["pages"] + only_a["kv_pages"] > 0.9 * POOL_PAGES
    assert by_name(shared)["a"]["kv_pages"] < only_a["kv_pages"] - 40
    assert shared["pages"]["adapter"] > full["pages"]["adapter"] + 40
    assert by_name(again)["a"]["kv_pages"] > 0.7 * POOL_PAGES
    assert again["pages"]["adapter"] < shared["pages"]["adapter"] - 40
    flushed(server)


def leave_early(server: Server, request: Request) -> None:
    body = request.body() | {"stream": True}
    with server.client.stream("POST", server.url + "/generate", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)


def reload(server: Server, name: str, folder: Path) -> None:
    assert server.unload(name).status_code == 200
    assert server.load(name, folder).status_code == 200


def test_adapters_come_and_go_while_requests_run(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    requests = [r for r in mixed_requests() if r.adapter][:60]
    answers: list[dict[str, Any] | None] = [None] * len(requests)

    def work(first: int) -> None:
        for i in range(first, len(requests), IN_FLIGHT):
            response = server.post("/generate", requests[i].body())
            if response.status_code != 404:  # unloaded just now
                answers[i] = response.json()
            if i % 5 == 0:
                leave_early(server, requests[i - 1])

    with Sampler(server), ThreadPoolExecutor(IN_FLIGHT) as threads:
        working = [threads.submit(work, first) for first in range(IN_FLIGHT)]
        for name in list(RANKS) * 2:
            reload(server, name, folders[name])
    for worker in working:
        worker.result()
    done = [(r, a) for r, a in zip(requests, answers, strict=True) if a is not None]
    assert len(done) > len(requests) // 2
    check(truth, [request for request, _ in done], [answer for _, answer in done])
    flushed(server)


def test_an_adapter_larger_than_the_pool_is_refused_with_both_sizes(
    server: Server, folders: dict[str, Path]
) -> None:
    response = server.load("too-big", folders["too-big"])
    page_bytes = server.pool()["page_bytes"]
    assert response.status_code == 400
    assert f"{POOL_PAGES * page_bytes:,} bytes" in response.text
    assert "188 pages" in response.text
    assert "--max-total-tokens" in response.text


def test_an_adapter_that_fills_most_of_the_pool(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    assert server.load("big", folders["big"]).status_code == 200
    requests = [Request(n, tiny_model.prompt(100, i)) for i, n in enumerate(["big", "a", "f"] * 4)]
    with Sampler(server):
        check(truth, requests, server.ask_all(requests, IN_FLIGHT))
    response = server.post("/generate", Request("big", tiny_model.prompt(700)).body())
    assert response.status_code == 400
    assert "does not fit into the pool" in response.text
    assert server.unload("big").status_code == 200
    flushed(server)
