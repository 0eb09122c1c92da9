"""Scheduling modes change when work is done, never what comes out."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_adapters
import tiny_model
from harness import STRICT, Request, Server, serve
from reference import Reference, check

pytestmark = pytest.mark.server

CHUNKS = ("--chunked-prefill-size", "64")
MODES = {
    "no prefix cache, chunks, retraction": ("--disable-radix-cache", *CHUNKS),
    "prefix cache, chunks, retraction": CHUNKS,
}
IN_FLIGHT = 12


@pytest.fixture(scope="module", params=MODES)
def server(
    request: pytest.FixtureRequest,
    base_model: Path,
    adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    flags = (*MODES[request.param], "--page-size", "16", "--max-total-tokens", "16384")
    flags += ("--enable-cache-report",)
    folder = tmp_path_factory.mktemp("server")
    env = STRICT | {"SGLANG_TEST_RETRACT": "1"}
    with serve(base_model, folder, *flags, adapters=adapters, env=env) as running:
        yield running


def test_concurrent_answers_are_the_reference(server: Server, reference: Reference) -> None:
    requests = [
        Request(name, tiny_model.prompt(length, seed=length))
        for length in (300, 40, 150, 3)
        for name in (None, *tiny_adapters.KINDS)
    ]
    for _ in range(2):  # the second time on what the first has left behind
        answers = server.ask_all(requests, IN_FLIGHT)
        check(reference, requests, answers)
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    if "--disable-radix-cache" in server.flags:
        assert server.pool()["pages"]["kv_cached"] == 0
    else:
        assert sum(cached) > 5000
    server.flush()
    pages = server.pool()["pages"]
    assert pages["free"] == pages["total"]
