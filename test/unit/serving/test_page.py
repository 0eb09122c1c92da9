"""The page in headless Chromium, against a server that says what a test wants it to say."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from browser import launched
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from helpers_overview import adapter, departure, overview, run

from sglang_graft.bench.process import free_port
from sglang_graft.serving import page_routes

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1180, "height": 900}
KEY = "s3cret"


class Fake:
    """The page's routes over an answer that a test may change; can be stopped and started."""

    def __init__(self) -> None:
        self.port = free_port()
        self.answer: dict[str, Any] = overview(100)
        self.key = ""
        self.asked: list[str] = []
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        app = FastAPI()
        app.include_router(page_routes.router)

        @app.get("/graft/overview")
        async def _(request: Request) -> JSONResponse:
            self.asked.append(str(request.url))
            if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
                return JSONResponse({"error": "Unauthorized"}, status_code=401)
            return JSONResponse(self.answer)

        options = uvicorn.Config(app, port=self.port, log_level="error", lifespan="off")
        self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()))
        self._thread.start()

    def stop(self) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


Open = Callable[..., Any]


@pytest.fixture
def show(browser: Any, fake: Fake) -> Iterator[Open]:
    """Open the page; errors of its scripts fail the test."""
    contexts, errors = [], []

    def show(size: dict[str, int] = DESK, scheme: str = "light", state: str = "Live") -> Any:
        context = browser.new_context(viewport=size, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(fake.url + "/graft")
        wait_for_state(page, state)
        return page

    yield show
    for context in contexts:
        context.close()
    assert errors == []


def wait_for_state(page: Any, text: str) -> None:
    wait_for_text(page, "state", text)


def wait_for_text(page: Any, element: str, text: str) -> None:
    reads = "([id, text]) => document.getElementById(id).textContent.includes(text)"
    page.wait_for_function(reads, arg=[element, text])


def texts(page: Any, selector: str) -> list[str]:
    found: list[str] = page.locator(selector).all_inner_texts()
    return [" ".join(text.split()) for text in found]


def cells(page: Any, kind: str) -> int:
    count: int = page.locator(f"#map rect.{kind}").count()
    return count


def test_the_pool_as_a_map_and_as_a_table(show: Open) -> None:
    page = show()
    # 200 pages are 200 cells: one each.
    wanted = {"weights": 24, "kv": 12, "running": 4, "flight": 24, "reserve": 6, "free": 130}
    assert {kind: cells(page, kind) for kind in wanted} == wanted
    rows = texts(page, "#adapters tr")
    assert rows[0].startswith("base model")
    assert rows[1] == "legal pinned device 24 6 3 1 step ago"
    assert rows[2] == "team/sales on its way 24 0 3 1 step ago"
    assert "200 pages of 1.0 MiB: weights 12.0 %" in page.inner_text("#pool-text")
    figures = dict(zip(texts(page, "#figures dt"), texts(page, "#figures dd"), strict=True))
    assert figures["adapters on the device"] == "1 of 2"
    assert figures["free pages"] == "68.0 %"
    assert figures["invalid KV pages"] == "0"


def test_the_tree_opens_by_keyboard_and_stays_open(show: Open, fake: Fake) -> None:
    page = show()
    branch = page.locator("#tree summary[data-branch='aaaaaaaaaaaaaaaa']")
    branch.focus()
    page.keyboard.press("Enter")
    lines = page.locator("#tree details[open] li")
    page.wait_for_function("() => document.querySelectorAll('#tree details[open]').length === 2")
    assert "96 tokens · 1 below · 2 steps ago" in lines.nth(1).inner_text()
    fake.answer["scheduler"]["adapters_shown"][1]["children_shown"] = [run(10, pages=3)]
    wait_for_text(page, "tree", "48 tokens")
    focused = page.evaluate("document.activeElement.dataset.branch")
    assert focused == "aaaaaaaaaaaaaaaa", "redrawing takes no focus away"
    assert page.locator("#tree details[open]").count() == 2


def test_an_adapter_can_be_picked_by_keyboard(show: Open) -> None:
    page = show()
    button = page.locator("#adapters button", has_text="legal")
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#map.picked")
    assert cells(page, "mine") == 30
    page.locator("#adapters button[aria-pressed='true']").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#map:not(.picked)")
    base = page.locator("#adapters button", has_text="base model")
    base.click()
    page.wait_for_selector("#map.picked")
    assert cells(page, "mine") == 6


def test_what_left_last_and_why(show: Open, fake: Fake) -> None:
    page = show()
    first, second = texts(page, "#left li")
    assert "legal KV, 12 pages, to make room for a request kept on host" in first
    assert "aaaaaaaaaa weights, 12 pages, because it was unloaded or replaced" in second
    fake.answer["scheduler"]["departures"] = []
    page.wait_for_selector("#left-none:not([hidden])")
    assert page.locator("#left li").count() == 0


def test_rates_come_alive(show: Open, fake: Fake) -> None:
    page = show()
    fake.answer = overview(200)
    values = "[...document.querySelectorAll('figcaption strong')]"
    page.wait_for_function(f"() => {values}.every(value => /[0-9]/.test(value.textContent))")
    titles = texts(page, "figcaption span")
    charts = dict(zip(titles, texts(page, "figcaption strong"), strict=True))
    assert charts["First token, median"].endswith("ms")
    assert charts["Requests"] != "0.0/s"
    label = page.locator("figure svg").first.get_attribute("aria-label")
    assert label.startswith("First token, median: now")


def test_a_server_that_is_restarted(show: Open, fake: Fake) -> None:
    page = show()
    fake.stop()
    wait_for_state(page, "No answer from the server")
    assert page.locator("#adapters tr").count() == 3, "the last picture stays"
    fake.answer = overview(3)  # its counters began anew
    fake.answer["scheduler"]["adapters_shown"].pop()
    fake.start()
    wait_for_state(page, "Live")
    page.wait_for_function("() => document.querySelectorAll('#adapters tr').length === 2")
    assert not [text for text in texts(page, "figcaption strong") if text.startswith("-")]


def test_a_busy_scheduler_is_said_to_be_busy(show: Open, fake: Fake) -> None:
    page = show()
    fake.answer["http"] |= {"stale": 1, "age": 42.0}
    wait_for_state(page, "The scheduler is busy: figures of 42 s ago")
    fake.answer["scheduler"] = None  # it never answered at all
    page.wait_for_timeout(1500)
    wait_for_state(page, "busy")


def test_the_key_is_asked_for_and_stays_out_of_the_url(show: Open, fake: Fake) -> None:
    fake.key = KEY
    page = show(state="Waiting for the key")
    field = page.locator("#key")
    assert field.get_attribute("type") == "password"
    assert page.evaluate("document.activeElement.id") == "key"
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 1, "there is nothing to see behind it"
    field.fill("wrong")
    page.keyboard.press("Enter")
    wait_for_text(page, "ask-text", "did not take")
    field.fill(KEY)
    page.keyboard.press("Enter")
    wait_for_state(page, "Live")
    assert page.evaluate("sessionStorage.getItem('graft-admin-key')") == KEY
    assert page.evaluate("localStorage.length + document.cookie.length") == 0
    page.reload()
    wait_for_state(page, "Live")
    assert page.url == fake.url + "/graft"
    assert not [url for url in fake.asked if KEY in url]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scroll(show: Open, fake: Fake, scheme: str) -> None:
    long = "team/" + "x" * 120
    more = {"children": 1, "children_shown": [run(12)]}
    fake.answer["scheduler"]["adapters_shown"].append(adapter(long, "c" * 16, **more))
    fake.answer["scheduler"]["departures"].insert(0, departure(name=long))
    fake.answer["model"] = "organisation/" + "model" * 20
    page = show(PHONE, scheme)
    page.locator("#tree summary").last.click()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


# Contrast as WCAG 2 defines it, of every element that has text of its own.
CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest("svg")) continue;
    const [a, b] = [parse(getComputedStyle(element).color), behind(element)].map(light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([ratio, element.tagName, element.textContent.trim().slice(0, 30)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(show: Open, scheme: str) -> None:
    page = show(DESK, scheme)
    found = page.evaluate(CONTRAST)
    assert len(found) > 40
    assert [row for row in found if row[0] < 4.5] == []


def test_light_and_dark_differ(show: Open) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    assert show(DESK, "light").evaluate(ground) != show(DESK, "dark").evaluate(ground)


def test_landmarks_headings_and_names(show: Open) -> None:
    page = show()
    for role in ("banner", "main", "contentinfo"):
        assert page.get_by_role(role).count() == 1, role
    assert page.get_by_role("heading", level=1).inner_text() == "Graft"
    for name in ("Pool", "Tree", "What left last", "Last two minutes"):
        assert page.get_by_role("heading", level=2, name=name).count() == 1
        assert page.get_by_role("region", name=name, exact=True).count() == 1
    picture = page.locator("#map")
    assert picture.get_attribute("role") == "img"
    assert page.get_by_role("img", name="200 pages of").count() == 1
    assert page.get_by_role("table", name="Adapters in the pool, in pages").count() == 1
    assert page.get_by_role("status").count() == 1
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_names_are_text_and_nothing_foreign_is_loaded(show: Open, fake: Fake) -> None:
    name = "<img src=x onerror=\"document.title='taken'\">"
    fake.answer["scheduler"]["adapters_shown"][1]["names"] = [name]
    fake.answer["scheduler"]["departures"][0]["name"] = name
    page = show()
    assert name in " ".join(texts(page, "#adapters tr"))
    assert page.locator("img").count() == 0
    assert page.title() == "Graft"
    urls = page.evaluate("performance.getEntriesByType('resource').map(e => e.name)")
    assert len(urls) > 4
    assert not [url for url in urls if not url.startswith(fake.url)]
