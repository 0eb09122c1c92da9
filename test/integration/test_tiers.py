"""A pool for three of twelve adapters: bytes go to the host and back, every answer stays right.

One server has a host pool that holds all images and KV besides, the other one so little that images
have to be read from disk again, and evicts by cost.
"""

import functools
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_adapters
import tiny_model
from harness import STRICT, Request, Server, serve, wait_until
from lifecycle import Stream
from reference import Reference, check

pytestmark = pytest.mark.server

PAGE_TOKENS = 16
PAGE_BYTES = 2 * 3 * PAGE_TOKENS * 2 * 16 * 4  # K and V, layers, tokens, heads, head size, float32
POOL_PAGES = 120
NAMES = [f"t{number}" for number in range(12)]
RANKS = dict.fromkeys(NAMES, 16)  # 24 pages each
BIG = {"big0": 64, "big1": 64}  # 94 pages each
SESSIONS, TURNS = 100, 5
IN_FLIGHT = 8
HOSTS = {"large": 2000, "small": 80}  # pages
POLICIES = {"large": "lru", "small": "cost"}
COUNTED = (
    "loads", "disk_reads", "failed_reads", "promotions", "write_backs", "thrash",
    "pages_to_device", "pages_to_host", "pages_from_disk", "hits_device", "hits_host", "hits_disk",
    "tokens_device", "tokens_host", "tokens_computed", "passes_waited", "seconds_waited",
    "kv_pages_demoted", "kv_pages_dropped",
)  # fmt: skip
only = functools.partial(pytest.mark.parametrize, "server", indirect=True, scope="module")
OWNERS = ("free", "adapter", "kv_cached", "in_flight")


def gigabytes(pages: int) -> str:
    return repr((pages + 0.5) * PAGE_BYTES / 2**30)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_adapters.save_ranks(tmp_path_factory.mktemp("adapters"), RANKS | BIG)


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path]) -> Reference:
    return Reference(tiny_model.new_model(), folders)


@pytest.fixture(scope="module", params=list(HOSTS))
def server(
    request: pytest.FixtureRequest,
    base_model: Path,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    flags = ["--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(POOL_PAGES * PAGE_TOKENS)]
    flags += ["--graft-host-memory-gb", gigabytes(HOSTS[request.param])]
    flags += ["--graft-policy", POLICIES[request.param]]
    folder = tmp_path_factory.mktemp("server")
    # Copies, so that a test may spoil them.
    own = {name: folder / name for name in NAMES}
    for name, path in own.items():
        shutil.copytree(folders[name], path)
    with serve(base_model, folder, *flags, adapters=own, env=STRICT) as running:
        yield running


def host(server: Server) -> dict[str, Any]:
    report: dict[str, Any] = server.pool()["host"]
    assert sum(report["pages"][owner] for owner in OWNERS) == report["pages"]["total"]
    return report


def is_small(server: Server) -> bool:
    return bool(host(server)["pages"]["total"] < 100)


def adapter(server: Server, name: str) -> dict[str, Any]:
    return next(a for a in server.pool()["adapters"] if a["name"] == name)


def flushed(server: Server) -> None:
    """Everything but the images of adapters is free again, on both sides."""
    server.flush()
    wait_until(lambda: host(server)["pages"]["in_flight"] == 0)
    pool = server.pool()
    assert pool["pages"]["free"] == pool["pages"]["total"] == POOL_PAGES
    assert pool["invalid_kv_pages"] == 0
    pages = pool["host"]["pages"]
    assert pages["kv_cached"] == 0
    assert pages["free"] + pages["adapter"] == pages["total"]
    assert pages["adapter"] == sum(a["host_pages"] for a in pool["adapters"])


def converse(server: Server, truth: Reference, seed: int) -> None:
    """One session: every turn continues the whole conversation so far."""
    source = random.Random(seed)
    name = source.choice([None, *NAMES])
    prompt = tiny_model.prompt(24, seed)
    for turn in range(TURNS):
        request = Request(name, prompt, new_tokens=8)
        answer = server.ask(request)
        check(truth, [request], [answer])
        prompt += tuple(answer["output_ids"]) + tiny_model.prompt(8, seed + 1000 * (turn + 1))


def push_out(server: Server, truth: Reference, names: list[str]) -> None:
    """Requests that fill the pool with other adapters and their KV."""
    requests = [Request(name, tiny_model.prompt(200, 7)) for name in names]
    check(truth, requests, server.ask_all(requests, 2))


def test_five_hundred_requests_of_sessions(server: Server, truth: Reference) -> None:
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        for result in [threads.submit(converse, server, truth, i) for i in range(SESSIONS)]:
            result.result()
    report = host(server)
    assert report["loads"] > 2 * len(RANKS), "adapters came and went"
    assert report["rates"]["changes"] > 0, "prices were measured"
    check_counters(server.pool(), report, SESSIONS * TURNS)
    assert report["promotions"] > 0
    assert report["tokens_host"] > 0
    assert report["kv_pages_demoted"] > 0
    if is_small(server):
        assert report["disk_reads"] > 0
        assert report["pages"]["free"] < server.adapter("t0")["weight_pages"], "it is full"
    else:
        assert report["disk_reads"] == 0
    flushed(server)


def check_counters(pool: dict[str, Any], report: dict[str, Any], requests: int) -> None:
    """Adapters and the base model together make the totals; bytes are pages."""
    assert pool["policy"] == POLICIES["small" if report["pages"]["total"] < 100 else "large"]
    rows = [pool["base"], *pool["adapters"]]
    for name in COUNTED:
        total, rounding = report[name], 1e-3
        assert abs(sum(row[name] for row in rows) - total) < rounding, name
    assert sum(row["hits_device"] + row["hits_host"] + row["hits_disk"] for row in rows) >= requests
    assert report["seconds_waited"] > 0
    assert report["evictions"] == sum(row["evictions"] for row in rows) > 0
    for way in ("to_device", "to_host", "from_disk"):
        assert report[f"bytes_{way}"] == report[f"pages_{way}"] * PAGE_BYTES
    assert report["pages_to_device"] > 0


@only(["large"])
def test_promoted_kv_gives_the_same_tokens(server: Server, truth: Reference) -> None:
    request = Request("t0", tiny_model.prompt(160, 3))
    first = server.ask(request)
    wait_until(lambda: adapter(server, "t0")["host_kv_pages"] >= 10)
    push_out(server, truth, NAMES[1:7])
    away = adapter(server, "t0")
    assert (away["state"], away["kv_pages"]) == ("host", 0)
    assert away["host_kv_pages"] >= 10
    before = host(server)["promotions"]
    again = server.ask(request)
    assert again["meta_info"]["cached_tokens"] >= 144, "nine pages came back"
    assert host(server)["promotions"] > before
    check(truth, [request, request], [first, again])
    flushed(server)


@only(["large"])
def test_other_weights_under_a_name_never_see_its_kv_on_the_host(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    request = Request("t0", tiny_model.prompt(160, 4))
    check(truth, [request], [server.ask(request)])
    wait_until(lambda: adapter(server, "t0")["host_kv_pages"] >= 10)
    push_out(server, truth, NAMES[1:7])
    away = adapter(server, "t0")
    assert (away["state"], away["kv_pages"]) == ("host", 0)
    for weights, folder in (("t11", folders["t11"]), ("t0", server.log.parent / "t0")):
        server.replace("t0", folder)
        answer = server.ask(request)
        check(truth, [Request(weights, request.prompt)], [answer])
        assert answer["meta_info"]["cached_tokens"] == 0
    flushed(server)


@only(["large"])
def test_adapters_of_which_one_fits_take_turns(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    for name in BIG:
        assert server.load(name, folders[name]).status_code == 200
    assert sum(adapter(server, name)["weight_pages"] for name in BIG) > POOL_PAGES
    requests = [Request(n, tiny_model.prompt(40, i)) for i, n in enumerate([*BIG, None] * 8)]
    check(truth, requests, server.ask_all(requests, IN_FLIGHT))
    assert all(adapter(server, name)["loads"] > 0 for name in BIG)
    for name in BIG:
        assert server.unload(name).status_code == 200
    flushed(server)


def test_fifty_first_uses_of_a_cold_adapter_are_one_load(server: Server, truth: Reference) -> None:
    server.flush()
    before = adapter(server, "t10")
    requests = [Request("t10", tiny_model.prompt(20, 5), new_tokens=2) for _ in range(50)]
    check(truth, requests, server.ask_all(requests, 50))
    after = adapter(server, "t10")
    assert after["loads"] == before["loads"] + 1
    assert after["disk_reads"] - before["disk_reads"] == (before["state"] == "disk")
    flushed(server)


def absent_from_host(server: Server) -> str:
    """An adapter whose image the small host pool has let go."""
    server.flush()
    return next(a["name"] for a in server.pool()["adapters"] if a["state"] == "disk")


def refused(server: Server, name: str, text: str) -> None:
    response = server.post("/generate", Request(name, tiny_model.prompt(20)).body())
    assert response.status_code == 400, response.text
    assert text in response.text


@only(["small"])
@pytest.mark.parametrize("fault", ["gone", "half", "other"])
def test_a_file_that_went_bad_after_its_registration(
    server: Server, truth: Reference, folders: dict[str, Path], fault: str
) -> None:
    name = absent_from_host(server)
    file = server.log.parent / name / tiny_adapters.WEIGHTS
    good = file.read_bytes()
    other = next(folder for key, folder in folders.items() if key != name)
    texts = {"gone": name, "half": tiny_adapters.WEIGHTS, "other": "hold other weights"}
    if fault == "gone":
        file.unlink()
    elif fault == "half":
        file.write_bytes(good[: len(good) // 2])
    else:
        file.write_bytes((other / tiny_adapters.WEIGHTS).read_bytes())
    sound = [n for n in NAMES if n != name]
    others = [Request(n, tiny_model.prompt(20)) for n in (None, *sound[:2])]
    with ThreadPoolExecutor(4) as threads:
        bad = [threads.submit(refused, server, name, texts[fault]) for _ in range(3)]
        check(truth, others, server.ask_all(others, 3))
        for result in bad:
            result.result()
    assert adapter(server, name)["failed_reads"] > 0
    file.write_bytes(good)
    request = Request(name, tiny_model.prompt(20))
    check(truth, [request], [server.ask(request)])
    flushed(server)


@only(["small"])
def test_a_lost_folder_fails_nobody_who_named_one_of_equal_weights(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    copy = shutil.copytree(folders["t0"], server.log.parent / "copy")
    assert server.load("copy", copy).status_code == 200
    others = [Request(name, tiny_model.prompt(20)) for name in NAMES[1:]]
    for request in others:
        check(truth, [request], [server.ask(request)])
    server.flush()
    before = adapter(server, "copy")
    assert before["state"] == "disk"
    file = server.log.parent / "t0" / tiny_adapters.WEIGHTS
    good = file.read_bytes()
    file.unlink()
    requests = [Request(name, tiny_model.prompt(20)) for name in ("copy", "t0")]
    wanted = [Request("t0", request.prompt) for request in requests]
    check(truth, wanted, [server.ask(request) for request in requests])
    assert adapter(server, "copy")["failed_reads"] == before["failed_reads"] + 1
    file.write_bytes(good)
    assert server.unload("copy").status_code == 200
    flushed(server)


def test_a_flush_behind_an_answer_is_not_refused(server: Server, truth: Reference) -> None:
    for number in range(12):
        request = Request(NAMES[number], tiny_model.prompt(20, number), new_tokens=1 + number % 3)
        check(truth, [request], [server.ask(request)])
        server.flush()
    flushed(server)


def test_a_flush_waits_for_requests_that_load_or_names_them(
    server: Server, truth: Reference
) -> None:
    requests = [Request(name, tiny_model.prompt(40, i)) for i, name in enumerate(NAMES * 2)]
    long = Stream(server, Request("t1", tiny_model.prompt(20, 9), new_tokens=1500)).started()
    refused = server.post("/flush_cache")
    assert refused.status_code == 400
    assert "1 requests are running and 0 are waiting" in refused.text
    assert "/flush_cache?timeout=SECONDS" in refused.text
    long.leave()
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        answers = [threads.submit(server.ask, request) for request in requests]
        waited = server.post("/flush_cache?timeout=250")
        assert waited.status_code == 200, waited.text
        check(truth, requests, [answer.result() for answer in answers])
    flushed(server)


def test_a_flush_during_loads_that_nobody_waits_for(server: Server, truth: Reference) -> None:
    for seed in range(3):
        streams = [
            Stream(server, Request(name, tiny_model.prompt(60, seed), 400)) for name in NAMES
        ]
        wait_until(lambda s=streams: any(stream.tokens for stream in s))
        assert server.post("/abort_request", {"abort_all": True}).status_code == 200
        for stream in streams:
            stream.join()
        server.flush()
    request = Request("t3", tiny_model.prompt(60, 1))
    check(truth, [request], [server.ask(request)])
    flushed(server)


def test_unload_abort_and_flush_while_adapters_load(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    requests = [Request(name, tiny_model.prompt(40, i)) for i, name in enumerate(NAMES * 4)]

    def one(request: Request) -> None:
        response = server.post("/generate", request.body())
        assert response.status_code in (200, 404), response.text
        if response.status_code == 200:
            check(truth, [request], [response.json()])

    def leave(request: Request) -> None:
        body = request.body() | {"stream": True}
        with server.client.stream("POST", server.url + "/generate", json=body):
            pass  # gone before the first token

    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        working = [threads.submit(one, request) for request in requests]
        working += [threads.submit(leave, request) for request in requests[::3]]
        for name in ("t2", "t5", "t8"):
            assert server.unload(name).status_code == 200
            flush = server.post("/flush_cache")
            refused = (flush.status_code, "requests are running" in flush.text) == (400, True)
            assert refused or flush.status_code == 200, flush.text
            assert server.load(name, server.log.parent / name).status_code == 200
        for result in working:
            result.result()
    wait_until(lambda: server.get("/graft/requests").json()["total"] == 0)
    flushed(server)
