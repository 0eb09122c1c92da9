"""`graft top`."""

import io
from typing import Any

import httpx
import pytest
from helpers_overview import adapter, overview
from rich.console import Console
from typer.testing import CliRunner

from sglang_graft.cli import top
from sglang_graft.cli.app import app
from sglang_graft.cli.top import fetch, first_token, rates, screen, watch


def shown(answer: dict[str, Any], rows: int = 20) -> str:
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(screen(answer, rates(answer, None, 0), first_token(answer, None), rows=rows))
    text: str = console.export_text()
    return text


def test_one_look() -> None:
    text = shown(overview(10))
    for part in ("200 pages of 1.00 MiB", "legal ^", "(base model) *", "team/sales", "loading"):
        assert part in text
    assert "first token 80 ms" in text
    assert "unloaded or replaced" in text
    assert "requests -/s" in text


def test_names_are_no_markup() -> None:
    answer = overview()
    answer["scheduler"]["adapters_shown"].append(adapter("[red]x[/nothing]", "c" * 16))
    assert "[red]x[/nothing]" in shown(answer)


def test_only_so_many_rows() -> None:
    text = shown(overview(), rows=1)
    assert "1 of 3 adapters" in text
    assert "team/sales" not in text


def test_a_busy_scheduler() -> None:
    answer = overview()
    answer["http"] |= {"stale": 1, "age": 42.0}
    assert "busy: figures of 42 s ago" in shown(answer)
    answer["scheduler"] = None
    assert "has not answered yet" in shown(answer)


def test_rates_and_first_tokens_since_the_last_look() -> None:
    before, now = overview(10), overview(30)
    assert rates(now, before, 4.0) == {
        "requests": 5.0, "errors": 0.0, "loads": 5.0, "evictions": 5.0
    }  # fmt: skip
    assert first_token(now, before) == pytest.approx(0.08)
    assert first_token(now, now) is None
    again = rates(overview(2), now, 1.0)
    assert again["requests"] == 2.0, "a server that began anew"


def test_it_goes_on_while_the_server_is_away() -> None:
    answers: list[Any] = [overview(1), httpx.ConnectError("refused"), overview(5)]
    slept: list[float] = []

    def ask() -> dict[str, Any]:
        if not answers:
            raise KeyboardInterrupt
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        found: dict[str, Any] = answer
        return found

    console = Console(force_terminal=True, width=100, height=40, file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        watch(ask, console, interval=0.5, sleep=slept.append)
    assert slept == [0.5] * 3


def test_the_key_travels_in_a_header() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://server/graft/overview"
        if request.headers.get("Authorization") != "Bearer s3cret":
            return httpx.Response(401)
        return httpx.Response(200, json=overview())

    with httpx.Client(transport=httpx.MockTransport(handle)) as client:
        assert fetch(client, "http://server/", "s3cret")["model"] == "base"
        with pytest.raises(httpx.HTTPStatusError):
            fetch(client, "http://server", "")


def test_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> dict[str, Any]:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(top, "fetch", refuse)
    result = CliRunner().invoke(app, ["top", "--once"])
    assert result.exit_code == 1
    assert "Is a server with --enable-graft running there?" in result.output
