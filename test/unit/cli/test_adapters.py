"""`graft adapters`: what is sent, what is shown, and exit codes."""

import json
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from sglang_graft.cli import adapters, control_client
from sglang_graft.cli.app import app

RUN = CliRunner()
ROW = {
    "name": "team/legal [x]",
    "state": "device",
    "aliases": ["law"],
    "bytes": 2**20,
    "kv_bytes": 2**19,
    "hits": 7,
    "idle_seconds": 3.2,
    "ttl_seconds": None,
    "priority": 1,
    "pinned": True,
    "requests": 2,
}
LEFT = [{"adapters": ["old"], "bytes": 2**20, "kv_bytes": 0}]


class Server:
    """Answers what the test says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.status, self.answer = 200, {"adapter": ROW, "left": []}
        self.key = ""

    def reply(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.asked.append((request.method, str(request.url).removeprefix("http://s"), body))
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        return httpx.Response(self.status, json=self.answer)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    transport = httpx.MockTransport(made.reply)

    def client(url: str, key: str) -> control_client.ControlClient:
        return control_client.ControlClient(url, key, transport=transport)

    monkeypatch.setattr(adapters, "ControlClient", client)
    return made


def graft(*line: str, **env: str) -> Any:
    return RUN.invoke(app, ["adapters", *line, "--url", "http://s"], env=env)


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        (["pin", "team/legal"], ("PATCH", "/graft/adapters/team/legal", {"pinned": True})),
        (["unpin", "a?b"], ("PATCH", "/graft/adapters/a%3Fb", {"pinned": False})),
        (["warm", "a", "--to", "host"], ("PATCH", "/graft/adapters/a", {"warm": "host"})),
        (["set", "a", "--no-ttl"], ("PATCH", "/graft/adapters/a", {"ttl_seconds": None})),
        (
            ["set", "a", "--ttl", "5", "--priority", "-1"],
            ("PATCH", "/graft/adapters/a", {"ttl_seconds": 5, "priority": -1}),
        ),
        (["why", "a", "--pin"], ("GET", "/graft/why/a?pin=true", None)),
        (
            ["why", "a", "/x"],
            (
                "POST",
                "/graft/adapters?dry_run=true",
                {"name": "a", "path": "/x", "pinned": False},
            ),
        ),
        (
            ["load", "a", "/x", "--pin", "--replace", "--ttl", "9"],
            (
                "POST",
                "/graft/adapters",
                {
                    "name": "a",
                    "path": "/x",
                    "load_inplace": True,
                    "pinned": True,
                    "ttl_seconds": 9,
                },
            ),
        ),
    ],
)
def test_a_command_asks_one_route(server: Server, line: list[str], asked: Any) -> None:
    result = graft(*line)
    assert result.exit_code == 0, result.output
    assert server.asked == [asked]


def test_ls_shows_a_row_for_each_adapter(server: Server) -> None:
    server.answer = {"adapters": [ROW], "available": [{"name": "n", "path": "/p"}], "aliases": {}}
    shown = graft("ls")
    assert "team/legal [x]" in shown.stdout, "brackets are no markup"
    assert "1.00" in shown.stdout
    assert "0.50" in shown.stdout
    assert "not loaded: n (/p)" in shown.stdout
    assert json.loads(graft("ls", "--json").stdout) == server.answer


def test_unload_says_what_is_freed_and_what_follows(server: Server) -> None:
    server.answer = {
        "freed_bytes": 2**20,
        "following_bytes": 2**21,
        "requests": 3,
        "loaded_again_on_use": True,
    }
    said = graft("unload", "a", "--dry-run").stdout
    assert "would unload a: 1.00 MiB free at once, 2.00 MiB with the last of 3 requests" in said
    assert "loads it again" in said
    assert server.asked == [("DELETE", "/graft/adapters/a?dry_run=true", None)]


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_what_did_not_happen_is_exit_1(server: Server, as_json: list[str]) -> None:
    warm = {"to": "device", "done": False, "missing_bytes": 2**20, "reason": "requests hold it"}
    server.answer = {"adapter": ROW, "left": LEFT, "warm": warm}
    result = graft("warm", "a", *as_json)
    assert result.exit_code == 1
    if not as_json:
        assert "leaves the device: old, 1.00 MiB of weights" in result.output
        assert "does not fit now (1.00 MiB too few): requests hold it" in result.output
    server.answer = {"fits": False, "reason": "too large", "bytes": 5, "leaves": []}
    assert graft("why", "a", *as_json).exit_code == 1


def test_refusals_are_told_with_their_reason(server: Server) -> None:
    server.status = 409
    for answer, words in (
        ({"message": "it is loaded"}, "it is loaded"),
        ({"error": {"message": "no room"}}, "no room"),
        ({"detail": "odd"}, "odd"),
        ({"x": 1}, "HTTP 409"),
        ([], "HTTP 409"),
    ):
        server.answer = answer  # type: ignore[assignment]
        result = graft("pin", "a")
        assert (result.exit_code, words in result.output) == (1, True)


def test_the_key_comes_from_the_option_or_the_environment(server: Server) -> None:
    server.key = "k"
    assert "GRAFT_ADMIN_KEY" in graft("pin", "a").output
    assert graft("pin", "a", "--key", "k").exit_code == 0
    assert graft("pin", "a", GRAFT_ADMIN_KEY="k").exit_code == 0


def test_wrong_arguments_are_exit_2(server: Server) -> None:
    assert graft("set", "a").exit_code == 2
    assert graft("set", "a", "--ttl", "5", "--no-ttl").exit_code == 2
    assert graft("set", "a", "--priority", "99").exit_code == 2
    assert server.asked == []
