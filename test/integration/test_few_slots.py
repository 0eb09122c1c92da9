"""Two adapters in a batch and a pool that holds about three: turns, evictions and pins."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_adapters
import tiny_model
from harness import STRICT, Request, Server, serve, wait_until
from lifecycle import BAD_REQUEST, OK, Stream, asking, loaded, unloaded
from reference import Reference, check

pytestmark = pytest.mark.server

SLOTS = 2
POOL_PAGES = 120
PAGE = 16
RANKS = {"A": 8, "B": 12, "C": 16, "D": 8, "E": 16, "F": 12, "G": 8, "H": 24}
MIXED = {f"m{i}": 64 if i % 5 == 4 else 8 for i in range(15)}
SMALL = {f"s{i}": 1 for i in range(60)}
SHORT = tiny_model.prompt(40, seed=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    small = {
        name: tiny_adapters.save(
            folder / name,
            {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
            seed=500 + number,
        )
        for number, name in enumerate(SMALL)
    }
    return small | tiny_adapters.save_ranks(folder, RANKS | MIXED | {"huge": 128})


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path]) -> Reference:
    usable = {name: folder for name, folder in folders.items() if name != "huge"}
    return Reference(tiny_model.new_model(), usable)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def server(
    base_model: Path,
    folders: dict[str, Path],
    log: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    flags = ["--page-size", str(PAGE), "--max-total-tokens", str(POOL_PAGES * PAGE)]
    flags += ["--max-loras-per-batch", str(SLOTS), "--enable-cache-report"]
    flags += ["--graft-host-memory-gb", "0.05"]  # every image stays
    flags += ["--graft-request-log", str(log)]
    given = {name: folders[name] for name in RANKS}
    folder = tmp_path_factory.mktemp("server")
    with serve(base_model, folder, *flags, adapters=given, env=STRICT) as running:
        yield running


@pytest.fixture(autouse=True)
def _eight_adapters(server: Server, folders: dict[str, Path]) -> Iterator[None]:
    """Every test ends with the adapters named at start, no request left, and every page free."""
    yield
    server.settle()
    names = {row["name"] for row in server.pool()["adapters"]}
    for name in names - set(RANKS):
        unloaded(server, name)
    for name in set(RANKS) - names:
        loaded(server, name, folders[name])
    server.flush()
    pool = server.pool()
    assert pool["pages"]["free"] == pool["pages"]["total"]
    weights = sum(row["weight_pages"] for row in pool["adapters"])
    assert pool["adapter_host_bytes"] == weights * pool["page_bytes"]


def test_c136_a_started_server_lists_what_it_was_given(server: Server) -> None:
    ids = [card["id"] for card in server.get("/v1/models").json()["data"]]
    assert ids[1:] == list(RANKS)


def test_c52_a_running_request_keeps_its_weights(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    requests = [Request(name, SHORT, 400) for name in ("A", "B")]
    streams = [Stream(server, request).started() for request in requests]
    others = []
    for name in ("m0", "m1", "m2"):
        loaded(server, name, folders[name])
        others.append(Stream(server, Request(name, SHORT)))
    check(truth, requests, [stream.result() for stream in streams])
    check(truth, [other.request for other in others], [other.result() for other in others])


def test_c70_more_adapters_than_slots_are_all_served(server: Server, truth: Reference) -> None:
    requests = [Request(name, SHORT) for _ in range(2) for name in RANKS]
    check(truth, requests, [server.ask(request) for request in requests])
    check(truth, requests, server.ask_all(requests, len(requests)))


def test_c80_fast_alternation_on_one_prefix(server: Server, truth: Reference) -> None:
    prompt = tiny_model.prompt(200, seed=8)
    requests = [Request(name, prompt, 8) for name in ("C", "E")] * 50
    check(truth, requests, [server.ask(request) for request in requests])
    check(truth, requests, server.ask_all(requests, 4))


def test_c85_admission_counts_bytes(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    for name in MIXED:
        loaded(server, name, folders[name])
    fill = [Request(None, tiny_model.prompt(250, seed=i), 4) for i in range(8)]
    check(truth, fill, server.ask_all(fill, 4))
    assert server.pool()["pages"]["free"] < POOL_PAGES // 4
    requests = [Request(name, tiny_model.prompt(60, seed=3)) for name in MIXED]
    check(truth, requests, server.ask_all(requests, len(requests)))


def test_c92_cycling_many_adapters_grows_nothing(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    for name in SMALL:
        loaded(server, name, folders[name])
    before = server.pool()
    requests = [Request(name, tiny_model.prompt(20, seed=4), 2) for name in SMALL]
    for cycle in range(1, 4):
        check(truth, requests, server.ask_all(requests, 6))
        report = server.pool()
        assert report["adapter_host_bytes"] == before["adapter_host_bytes"]
        rows = [row for row in report["adapters"] if row["name"] in SMALL]
        assert all(row["loads"] <= cycle for row in rows)


def test_c94_an_adapter_larger_than_the_pool_is_refused_and_others_served(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    response = server.load("huge", folders["huge"])
    assert response.status_code == BAD_REQUEST
    assert f"the whole pool has {POOL_PAGES}" in response.text
    requests = [Request(name, SHORT) for name in (None, "A")]
    check(truth, requests, server.ask_all(requests, 2))


def test_c100_c101_no_request_passes_one_that_waits_for_a_slot(
    server: Server, truth: Reference, log: Path
) -> None:
    before = len(log.read_text().splitlines())
    running = [Stream(server, Request(n, SHORT, new)) for n, new in (("A", 400), ("B", 700))]
    for stream in running:
        stream.started()
    queue = [Stream(server, Request("C", SHORT, 2))]
    wait_until(lambda: server.requests()["adapters"]["C"] == 1)
    # While its adapter is on its way others may pass a few times; it shall wait for the slot alone.
    wait_until(lambda: server.adapter("C")["state"] == "device")
    for seed in range(6):  # all of them could start at once: their adapter has its slot
        queue.append(Stream(server, Request("B", tiny_model.prompt(20, seed), 2)))
    wait_until(lambda: server.requests()["adapters"]["B"] == 7)
    everyone = [*running, *queue]
    check(truth, [s.request for s in everyone], [s.result() for s in everyone])
    # When they ended for the server: here threads that read long streams may be behind.
    wait_until(lambda: len(log.read_text().splitlines()) == before + len(everyone))
    ended = [json.loads(line) for line in log.read_text().splitlines()[before:]]
    tokens = [line["completion_tokens"] for line in sorted(ended, key=lambda line: line["time"])]
    assert tokens[0] == 400, "until A ends the first in line waits, and everybody behind it"
    assert tokens[-1] == 700


def pinned(server: Server) -> set[str]:
    return {row["name"] for row in server.pool()["adapters"] if row["pinned"]}


def churn(server: Server, truth: Reference) -> None:
    """Traffic that pushes every adapter out that can be."""
    requests = [Request(name, tiny_model.prompt(100, seed=6)) for name in RANKS]
    check(truth, requests, server.ask_all(requests, 4))


def test_a_pinned_adapter_is_never_evicted(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    loaded(server, "m0", folders["m0"], pinned=True)
    row = server.adapter("m0")
    assert row["pages"] == row["weight_pages"], "promoted at once"
    assert pinned(server) == {"m0"}
    churn(server, truth)
    request = Request("m0", SHORT)
    check(truth, [request], [server.ask(request)])
    row = server.adapter("m0")
    assert (row["state"], row["loads"], row["evictions"], row["locks"]) == ("device", 1, 0, 0)
    server.flush()
    pool = server.pool()
    assert pool["pages"]["free"] == pool["pages"]["total"] - row["weight_pages"]
    assert pinned(server) == {"m0"}
    check(truth, [request], [server.ask(request)])
    held = server.adapter("m0")
    answer = unloaded(server, "m0")
    assert answer["freed_pages"] == held["pages"] + held["kv_pages"]


def test_pins_leave_room_for_the_largest_adapter_and_a_request(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    largest = server.adapter("H")["weight_pages"]
    taken = 0
    for name in (f"m{i}" for i in range(15) if MIXED[f"m{i}"] == 8):
        response = server.load(name, folders[name], pinned=True)
        if response.status_code != OK:
            break
        taken += server.adapter(name)["weight_pages"]
    assert 0 < taken <= POOL_PAGES - largest - 3
    assert f"the largest other adapter needs {largest}" in response.text
    assert name not in {row["name"] for row in server.pool()["adapters"]}
    churn(server, truth)
    loaded(server, name, folders[name])  # not pinned: it takes turns
    check(truth, [Request(name, SHORT)], [server.ask(Request(name, SHORT))])
    # The prompt would fit into the pool, but not beside the pins.
    prompt = tiny_model.prompt((POOL_PAGES - taken) * PAGE - 20, seed=1)
    response = server.post("/generate", Request(None, prompt).body())
    assert response.status_code == BAD_REQUEST
    assert "pinned" in response.text


def test_a_pin_waits_for_requests_that_need_the_pool(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    request = Request(None, tiny_model.prompt(800, seed=1), 900)
    running = Stream(server, request).started()
    response = server.load("m4", folders["m4"], pinned=True)
    assert response.status_code == BAD_REQUEST
    assert "under way" in response.text
    check(truth, [request], [running.result()])
    assert "m4" not in {row["name"] for row in server.pool()["adapters"]}


def test_a_pinned_adapter_is_replaced_by_a_pinned_one(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    loaded(server, "p", folders["m0"], pinned=True)
    request = Request("p", SHORT, 150)
    running = Stream(server, request).started()
    server.replace("p", folders["m1"], pinned=True)
    assert pinned(server) == {"p"}
    check(truth, [Request("m0", SHORT, 150)], [running.result()])
    check(truth, [Request("m1", SHORT, 150)], [server.ask(request)])
    refused = server.load("p", folders["m4"], pinned=True, load_inplace=True)
    assert refused.status_code == BAD_REQUEST
    assert pinned(server) == {"p"}, "a refused replacement leaves the old pin"
    churn(server, truth)
    check(truth, [Request("m1", SHORT, 150)], [server.ask(request)])
    server.replace("p", folders["m2"])
    assert pinned(server) == set()
    churn(server, truth)
    server.settle()
    assert server.adapter("p")["pages"] in (0, server.adapter("p")["weight_pages"])


def test_equal_weights_pinned_twice_hold_one_copy(server: Server, folders: dict[str, Path]) -> None:
    loaded(server, "p", folders["m0"], pinned=True)
    before: dict[str, Any] = server.pool()["pages"]
    pages = before["adapter"] + before["in_flight"]
    loaded(server, "q", folders["m0"], pinned=True)
    now: dict[str, Any] = server.pool()["pages"]
    assert now["adapter"] + now["in_flight"] == pages > 0
    assert unloaded(server, "p")["freed_pages"] == 0
    assert pinned(server) == {"q"}
    assert unloaded(server, "q")["freed_pages"] == pages


def test_requests_of_replaced_adapters_take_turns_too(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    streams = []
    versions = []
    for name, version in itertools.product(("A", "B"), ("C", "E", "F")):
        server.replace(name, folders[version])
        request = Request(name, tiny_model.prompt(60, seed=len(streams)), 40)
        stream = Stream(server, request)
        streams.append(stream)
        # Accepted, waiting or not; a quick one may have ended by the time that we look.
        wait_until(
            lambda n=name, s=stream: s.tokens
            or not s.is_running()
            or server.requests()["adapters"][n] == 1
        )
        versions.append(version)
    wanted = [
        Request(version, stream.request.prompt, 40)
        for version, stream in zip(versions, streams, strict=True)
    ]
    with asking(server, [Request("G", SHORT)]) as answers:
        check(truth, wanted, [stream.result() for stream in streams])
    check(truth, [Request("G", SHORT)], [answer.result() for answer in answers])
    server.replace("A", folders["A"])
    server.replace("B", folders["B"])
