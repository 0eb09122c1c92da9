"""The page at `/graft` in headless Chromium, on a real server with an admin key.

Without --enable-metrics, so `/metrics` has Graft's own only. The page's states are in
test/unit/serving/test_page.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_adapters
import tiny_model
from browser import launched
from harness import STRICT, Request, Server, serve
from prometheus_client.parser import text_string_to_metric_families as parse

from sglang_graft.serving.metrics_table import METRICS

pytestmark = pytest.mark.server

NAMES = [f"p{number}" for number in range(4)]
PAGE_TOKENS = 16
POOL_PAGES = 80
KEY = "admin-s3cret"


@pytest.fixture(scope="module")
def server(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    adapters = tiny_adapters.save_ranks(folder, dict.fromkeys(NAMES, 16))
    flags = ["--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(POOL_PAGES * PAGE_TOKENS)]
    flags += ["--admin-api-key", KEY]
    with serve(base_model, folder, *flags, adapters=adapters, env=STRICT) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        for number, name in enumerate([None, *NAMES]):
            running.ask(Request(name, tiny_model.prompt(40, number), new_tokens=3))
        yield running


def is_refused(said: Any) -> bool:
    return "Security Policy" in said.text


@pytest.fixture
def page(server: Server) -> Iterator[Any]:
    """The page before its key was given."""
    errors: list[str] = []
    with launched() as browser:
        found = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
        found.on("pageerror", lambda error: errors.append(str(error)))
        found.on("console", lambda said: errors.append(said.text) if is_refused(said) else None)
        found.goto(server.url + "/graft")
        yield found
    assert errors == []


def says(page: Any, text: str) -> None:
    reads = "t => document.getElementById('state').textContent.includes(t)"
    page.wait_for_function(reads, arg=text)


def enter(page: Any, key: str) -> None:
    page.fill("#key", key)
    page.keyboard.press("Enter")


def test_files_are_open_and_what_they_show_is_not(server: Server) -> None:
    for path in ("/graft", "/graft/page/app.js", "/metrics"):
        assert httpx.get(server.url + path, timeout=30).status_code == 200
    assert httpx.get(server.url + "/graft/overview", timeout=30).status_code == 401
    overview = server.get("/graft/overview")
    assert overview.status_code == 200
    # The words of the tiny model are w1, w2, ...; a folder may be called so, too.
    text = json.dumps(overview.json() | {"model": ""})
    assert "w1" not in text, "no words of any prompt"


def test_metrics_are_there_without_sglangs_own(server: Server) -> None:
    names = {family.name for family in parse(server.get("/metrics").text)}
    assert {metric.name.removesuffix("_total") for metric in METRICS} <= names
    assert not [name for name in names if name.startswith("sglang")]


def test_the_page_shows_this_server(server: Server, page: Any) -> None:
    says(page, "Waiting for the key")
    enter(page, "wrong")
    page.wait_for_function(
        "() => document.getElementById('ask-text').textContent.includes('did not take')"
    )
    enter(page, KEY)
    says(page, "Live")
    assert page.url == server.url + "/graft"
    pool = server.pool()
    rows = page.locator("#adapters tr").all_inner_texts()
    assert sorted(row.split()[0] for row in rows) == sorted(["base", *NAMES])
    kinds = {"weights": "adapter", "kv": "kv_cached", "running": "kv_running"}
    for kind, owner in kinds.items():
        cells = page.locator(f"#map rect.{kind}").count()
        assert cells == pool["pages"][owner], "a cell is a page in a pool this small"
    assert page.locator("#map rect").count() == POOL_PAGES
    left = page.locator("#left li").all_inner_texts()
    assert any("to make room for an adapter" in line for line in left)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator("#figures .alarm").count() == 0


def test_it_follows_what_happens(server: Server, page: Any) -> None:
    says(page, "Waiting for the key")
    enter(page, KEY)
    says(page, "Live")
    server.load("late", server.log.parent / "p0")
    for number in range(3):
        server.ask(Request("late", tiny_model.prompt(60, 50 + number), new_tokens=2))
    page.wait_for_function("() => document.getElementById('adapters').textContent.includes('late')")
    page.wait_for_function(
        "() => /[0-9] ms|[0-9] s/.test(document.querySelector('figcaption strong').textContent)"
    )
    server.unload("late")
    page.wait_for_function(
        "() => !document.getElementById('adapters').textContent.includes('late')"
    )
