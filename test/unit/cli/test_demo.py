"""The demo against a small fake server: no model, no SGLang."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers_pool import POOL
from rich.console import Console

from sglang_graft.cli import demo
from sglang_graft.cli.demo_client import ask, pool_state
from sglang_graft.cli.demo_server import ServerError
from sglang_graft.cli.pool_table import show_pool


class FakeServer(BaseHTTPRequestHandler):
    """Echoes the model's name in two pieces; a prompt that it has seen is reported as cached."""

    seen: set[tuple[str, str]]
    bodies: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._reply(200, json.dumps(POOL))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        model = body["model"]
        if model == "unknown":
            self._reply(404, json.dumps({"message": "loaded: legal"}))
            return
        key = (model, body["messages"][0]["content"])
        details = {"cached_tokens": 64} if key in self.seen else None
        self.seen.add(key)
        pieces = {"mute": [], "broken": ["x"]}.get(model, [f"I am {model}", "."])
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant"}}]}]
        events += [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        if model == "broken":
            events.append({"error": {"message": "out of order"}})
        events.append({"choices": [], "usage": {"prompt_tokens_details": details}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._reply(200, "".join([*lines, "data: [DONE]\n\n"]))

    def _reply(self, status: int, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    FakeServer.seen, FakeServer.bodies = set(), []
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with httpx.Client(base_url=url) as opened:
            yield opened
        server.shutdown()
        thread.join()


def ask_model(client: httpx.Client, adapter: str | None) -> Any:
    return ask(client, base="base", adapter=adapter, question="Why?", max_tokens=8)


def test_ask_streams_greedily_and_joins_the_pieces(client: httpx.Client) -> None:
    answer = ask_model(client, "legal")
    assert (answer.adapter, answer.text, answer.cached_tokens) == ("legal", "I am legal.", 0)
    assert answer.ttft_ms > 0
    body = FakeServer.bodies[0]
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["temperature"] == 0


def test_base_is_asked_by_its_served_name(client: httpx.Client) -> None:
    answer = ask_model(client, None)
    assert (answer.adapter, answer.text) == (None, "I am base.")


@pytest.mark.parametrize(
    ("model", "words"),
    [("unknown", "404.*loaded: legal"), ("broken", "out of order"), ("mute", "got no text")],
)
def test_a_failure_carries_the_words_of_the_server(
    client: httpx.Client, model: str, words: str
) -> None:
    with pytest.raises(ServerError, match=words):
        ask_model(client, model)


def test_everyone_is_asked_once_before_anyone_is_asked_again(client: httpx.Client) -> None:
    first, again = demo.ask_all(
        client, ["code", "legal"], base="base", question="Why?", console=Console(quiet=True)
    )
    assert [body["model"] for body in FakeServer.bodies] == ["base", "code", "legal"] * 2
    assert [answer.cached_tokens for answer in first] == [0, 0, 0]
    assert [answer.cached_tokens for answer in again] == [64, 64, 64]

    shown = json.loads(demo.result(first, again, pool_state(client)))
    assert set(shown) == {"answers", "pool"}
    assert shown["pool"] == POOL
    assert [answer["adapter"] for answer in shown["answers"]] == [None, "code", "legal"]
    for answer, cold in zip(shown["answers"], first, strict=True):
        assert set(answer) == {"adapter", "text", "ttft_ms", "cached_tokens"}
        assert answer["ttft_ms"] == cold.ttft_ms
        assert answer["cached_tokens"] == 64


def test_tables_show_answers_and_owners_of_pages(client: httpx.Client) -> None:
    first, again = demo.ask_all(
        client, ["legal"], base="base", question="[Why]?", console=Console(quiet=True)
    )
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(demo.answer_table(first, again))
    show_pool(pool_state(client), console)
    text = console.export_text()
    for words in ("(base)", "I am legal.", "64", "kv_cached", "1.00 MiB", "invalid_kv", "legal"):
        assert words in text


def test_keep_and_json_go_together(
    client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The JSON object is the last line even when the way to call the server is shown."""
    (tmp_path / "legal").mkdir()
    (tmp_path / "legal" / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(demo, "ensure_base_model", lambda: tmp_path)
    monkeypatch.setattr(demo, "running", lambda *_, **__: _Given(str(client.base_url)))
    monkeypatch.setattr(demo.signal, "pause", lambda: None)
    assert demo.main(["--keep", "--json", "--adapters", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("curl ") for line in lines)
    assert json.loads(lines[-1])["answers"][1]["adapter"] == "legal"


class _Given:
    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> str:
        return self.url

    def __exit__(self, *_: object) -> None:
        """Nothing was started."""


def test_adapters_are_found_by_their_config_in_order(tmp_path: Path) -> None:
    for name in ("b", "a", "no-adapter"):
        (tmp_path / name).mkdir()
    for name in ("b", "a"):
        (tmp_path / name / "adapter_config.json").write_text("{}")
    assert demo.find_adapters(tmp_path) == {"a": tmp_path / "a", "b": tmp_path / "b"}


def test_no_adapters_is_refused_with_the_flag_to_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--adapters"):
        demo.find_adapters(tmp_path)
