"""Names, weights and prefix KV: what is replaced, what is kept, and what can never be reached."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_adapters
import tiny_model
from harness import STRICT, Request, Server, serve
from lifecycle import (
    ALL_LINEARS,
    BAD_REQUEST,
    NOT_FOUND,
    OK,
    Stream,
    answered_by,
    cached,
    loaded,
    save_versions,
    unloaded,
)
from reference import Reference, check
from sglang.srt.lora.lora_registry import LoRARef

pytestmark = pytest.mark.server

PAGE = 16
LONG = tiny_model.prompt(512, seed=1)
SHORT = tiny_model.prompt(40, seed=2)
PATTERN = {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEARS, "rank_pattern": {"q_proj": 2}}
GIVEN = "given"  # named at start: everybody can compute its id
WHOLE_PAGES = (len(LONG) - 1) // PAGE * PAGE


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("versions")
    versions = save_versions(folder, ["v1", "v2", "v3", GIVEN])
    return versions | {"pattern": tiny_adapters.save(folder / "pattern", PATTERN, seed=399)}


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path]) -> Reference:
    return Reference(tiny_model.new_model(), folders)


@pytest.fixture(scope="module")
def server(
    base_model: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    # Another order of the waiting queue than first come, first served: C82.
    flags = ["--page-size", str(PAGE), "--max-total-tokens", "16384", "--schedule-policy", "lpm"]
    flags += ["--chunked-prefill-size", "128", "--enable-cache-report"]
    folder = tmp_path_factory.mktemp("server")
    given = {GIVEN: folders[GIVEN]}
    with serve(base_model, folder, *flags, adapters=given, env=STRICT) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_stays(server: Server) -> Iterator[None]:
    """Every test ends with no request left, its adapters gone, and every page free."""
    yield
    server.settle()
    for row in server.pool()["adapters"]:
        if row["name"] != GIVEN:
            unloaded(server, row["name"])
    server.flush()
    pool = server.pool()
    assert pool["pages"]["free"] == pool["pages"]["total"]
    weights = server.adapter(GIVEN)["weight_pages"]
    assert pool["adapter_host_bytes"] == weights * pool["page_bytes"]


def as_version(version: str, request: Request) -> Request:
    """The same request, named after the weights that must answer it."""
    return Request(version, request.prompt, request.new_tokens)


def test_c05_scale_after_a_swap_is_the_scale_of_a_fresh_load(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    request = Request("a", LONG)
    loaded(server, "a", folders["v1"])
    check(truth, [as_version("v1", request)], [server.ask(request)])
    server.replace("a", folders["pattern"])
    swapped = server.generate(request.body() | {"return_logprob": True})
    loaded(server, "fresh", folders["pattern"])
    server.settle()
    server.flush()  # both compute the prompt
    fresh = server.generate(Request("fresh", LONG).body() | {"return_logprob": True})
    check(truth, [as_version("pattern", request)] * 2, [swapped, fresh])
    logprobs = "output_token_logprobs"
    assert swapped["meta_info"][logprobs] == fresh["meta_info"][logprobs]


def test_c53_a_reused_name_serves_the_new_weights(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    request = Request("a", SHORT)
    for version in ("v1", "v2", "v1"):
        loaded(server, "a", folders[version])
        check(truth, [as_version(version, request)], [server.ask(request)])
        unloaded(server, "a")


def test_running_requests_finish_on_the_old_weights(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    loaded(server, "a", folders["v1"])
    pages = server.adapter("a")["weight_pages"]
    old = Stream(server, Request("a", LONG, new_tokens=1000)).started()
    answer = server.replace("a", folders["v2"])
    assert answer["requests"] == 1
    assert answer["following_pages"] > pages, "weights, and the prompt's KV"
    assert answer["following_bytes"] == answer["following_pages"] * server.pool()["page_bytes"]
    new = Request("a", LONG)
    first = server.ask(new)
    assert cached(first) == 0
    second = server.ask(new)
    assert cached(second) == WHOLE_PAGES
    check(truth, [as_version("v2", new)] * 2, [first, second])
    assert server.requests()["adapters"]["a"] == 0
    check(truth, [as_version("v1", old.request)], [old.result()])
    server.settle()
    report = server.pool()
    assert report["pages"]["adapter"] == server.adapter("a")["pages"] == pages
    assert report["pages"]["kv_cached"] == server.adapter("a")["kv_pages"]


def test_requests_that_wait_finish_on_the_old_weights(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    loaded(server, "a", folders["v1"])
    old = [Stream(server, Request("a", tiny_model.prompt(300, i), 60)) for i in range(12)]
    for version in ("v2", "v3"):  # twice: two generations wait at a time
        old[0].started()
        server.replace("a", folders[version])
        old.append(Stream(server, Request("a", SHORT, 60)))
    # Whoever was accepted before a replacement has its weights; the others have the next ones.
    for stream in old:
        answered_by(truth, ("v1", "v2", "v3"), stream.request, stream.result())
    first, last = old[0], old[-1]
    check(truth, [as_version("v1", first.request)], [first.result()])
    check(truth, [as_version("v3", last.request)], [last.result()])


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_c55_replace_and_unload_while_requests_are_paused(
    server: Server, truth: Reference, folders: dict[str, Path], mode: str
) -> None:
    loaded(server, "a", folders["v1"])
    loaded(server, "b", folders["v3"])
    # Long answers, so that the first still runs when the second has started.
    paused = [Stream(server, Request(name, LONG, new_tokens=1000)).started() for name in "ab"]
    assert server.post("/pause_generation", {"mode": mode}).status_code == OK
    try:
        server.replace("a", folders["v2"])
        answer = unloaded(server, "b")
        assert answer["requests"] == 1
        new = Stream(server, Request("a", LONG))  # waits until generation continues
        assert {row["name"] for row in server.requests()["retired"]} == {"a", "b"}
    finally:
        assert server.post("/continue_generation").status_code == OK
    versions = ("v1", "v3", "v2")
    streams = [*paused, new]
    wanted = [as_version(v, s.request) for v, s in zip(versions, streams, strict=True)]
    check(truth, wanted, [stream.result() for stream in streams])


def test_a_bad_replacement_changes_nothing(
    server: Server, truth: Reference, folders: dict[str, Path], tmp_path: Path
) -> None:
    loaded(server, "a", folders["v1"])
    request = Request("a", LONG, new_tokens=100)
    check(truth, [as_version("v1", request)], [server.ask(request)])
    before = server.pool()
    running = Stream(server, request).started()
    broken = tiny_adapters.save(tmp_path / "broken", PATTERN, seed=5)
    (broken / tiny_adapters.WEIGHTS).write_bytes(b"not a safetensors file")
    for folder in (broken, tmp_path / "nowhere"):
        response = server.load("a", folder, load_inplace=True)
        assert response.status_code == BAD_REQUEST
        assert str(folder) in response.json()["error_message"]
    check(truth, [as_version("v1", request)], [running.result()])
    answer = server.ask(request)
    check(truth, [as_version("v1", request)], [answer])
    assert cached(answer) == WHOLE_PAGES
    after = server.pool()
    assert [row["identity"] for row in after["adapters"]] == [
        row["identity"] for row in before["adapters"]
    ]
    assert after["adapter_host_bytes"] == before["adapter_host_bytes"]


def test_replacing_by_equal_weights_keeps_the_kv(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    loaded(server, "a", folders["v1"])
    request = Request("a", LONG)
    server.ask(request)
    before = server.pool()
    answer = server.replace("a", folders["v1"])
    assert (answer["freed_pages"], answer["following_pages"]) == (0, 0)
    again = server.ask(request)
    check(truth, [as_version("v1", request)], [again])
    assert cached(again) == WHOLE_PAGES
    after = server.pool()
    assert after["pages"] == before["pages"]
    assert after["adapter_bytes_loaded"] == before["adapter_bytes_loaded"]


def test_replace_loads_a_name_that_is_not_loaded(server: Server, folders: dict[str, Path]) -> None:
    server.replace("a", folders["v1"])
    assert server.adapter("a")["name"] == "a"


def test_an_unload_keeps_kv_only_while_the_weights_have_another_user(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    request = Request("a", LONG)
    loaded(server, "a", folders["v1"])
    server.ask(request)
    answer = unloaded(server, "a")
    assert (answer["requests"], answer["following_pages"]) == (0, 0)
    assert answer["freed_pages"] > 0
    loaded(server, "a", folders["v1"])
    assert cached(server.ask(request)) == 0, "the bytes went with the last user"
    running = Stream(server, Request("a", SHORT, new_tokens=1000)).started()
    unloaded(server, "a")
    loaded(server, "b", folders["v1"])
    shared = server.ask(Request("b", running.request.prompt))
    assert cached(shared) == (len(SHORT) - 1) // PAGE * PAGE, "a request still held the identity"
    check(truth, [as_version("v1", running.request)], [running.result()])
    check(truth, [Request("v1", SHORT)], [shared])


def test_c64_one_path_under_two_names_shares_bytes(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    loaded(server, "a", folders["v1"])
    server.ask(Request("a", LONG))
    before = server.pool()
    loaded(server, "b", folders["v1"])
    answer = server.ask(Request("b", LONG))
    after = server.pool()
    check(truth, [Request("v1", LONG)], [answer])
    assert cached(answer) == WHOLE_PAGES
    assert after["adapter_host_bytes"] == before["adapter_host_bytes"]
    assert after["pages"]["adapter"] == before["pages"]["adapter"]
    assert unloaded(server, "a")["freed_pages"] == 0
    assert unloaded(server, "b")["freed_pages"] > 0


def test_c65_a_loaded_name_is_refused_without_the_flag(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    loaded(server, "a", folders["v1"])
    for more in ({}, {"load_inplace": False}):
        response = server.load("a", folders["v2"], **more)
        assert response.status_code == BAD_REQUEST
        assert "already loaded" in response.text
        assert "load_inplace" in response.text
    request = Request("a", SHORT)
    check(truth, [as_version("v1", request)], [server.ask(request)])
    assert server.load("a", folders["v2"], load_inplace="perhaps").status_code == BAD_REQUEST


@pytest.mark.parametrize("way", ["unload and load", "replace"])
def test_c76_new_weights_under_an_old_name_never_see_old_kv(
    server: Server, truth: Reference, folders: dict[str, Path], way: str
) -> None:
    request = Request("a", LONG)
    loaded(server, "a", folders["v1"])
    server.ask(request)
    if way == "replace":
        server.replace("a", folders["v2"])
    else:
        unloaded(server, "a")
        loaded(server, "a", folders["v2"])
    answer = server.ask(request)
    assert cached(answer) == 0
    check(truth, [as_version("v2", request)], [answer])


def test_c77_two_weights_of_one_name_have_separate_kv(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    request = Request("x", LONG)
    loaded(server, "x", folders["v1"])
    loaded(server, "keeps v1", folders["v1"])
    answers = [server.ask(request)]
    server.replace("x", folders["v2"])
    answers.append(server.ask(request))
    server.replace("x", folders["v1"])
    answers.append(server.ask(request))
    assert [cached(answer) for answer in answers] == [0, 0, WHOLE_PAGES]
    check(truth, [as_version(v, request) for v in ("v1", "v2", "v1")], answers)


def test_c79_a_clients_key_never_reaches_another_namespace(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    known_id = LoRARef.deterministic_id(GIVEN, str(folders[GIVEN]))
    assert known_id in server.log.read_text(), "the id that everybody can compute"
    server.ask(Request(GIVEN, LONG))
    loaded(server, "a", folders["v1"])
    half = known_id[:16]
    for adapter, version in ((None, None), ("a", "v1"), (GIVEN, GIVEN)):
        for key in (known_id, half, known_id[16:], "ab", "abc"):
            body = Request(adapter, LONG).body() | {"extra_key": key}
            first, second = server.generate(body), server.generate(body)
            check(truth, [Request(version, LONG)] * 2, [first, second])
            assert (cached(first), cached(second)) == (0, WHOLE_PAGES), (adapter, key)
    assert cached(server.ask(Request(GIVEN, LONG))) == WHOLE_PAGES


def chat(server: Server, adapter: str | None, turns: int) -> tuple[int, int, list[Any]]:
    """Cached and computed prompt tokens of a conversation, and its requests and answers."""
    source = random.Random(7)
    prompt: tuple[int, ...] = ()
    hits = tokens = 0
    told = []
    for _ in range(turns):
        prompt += tuple(source.randrange(tiny_model.VOCABULARY) for _ in range(20))
        request = Request(adapter, prompt, new_tokens=12)
        answer = server.ask(request)
        told.append((request, answer))
        hits, tokens = hits + cached(answer), tokens + len(prompt)
        prompt += tuple(answer["output_ids"])
    return hits, tokens, told


def test_c82_a_conversation_hits_the_cache_as_the_base_model_does(
    server: Server, truth: Reference, folders: dict[str, Path]
) -> None:
    loaded(server, "a", folders["v1"])
    base, adapter = chat(server, None, 20), chat(server, "a", 20)
    assert adapter[:2] == base[:2]
    assert adapter[0] > 0.8 * adapter[1]
    check(truth, [as_version("v1", r) for r, _ in adapter[2]], [a for _, a in adapter[2]])
    assert (
        server.post("/generate", {"input_ids": [1], "lora_path": "gone"}).status_code == NOT_FOUND
    )
