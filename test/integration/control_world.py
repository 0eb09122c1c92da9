"""A server whose adapters are controlled from outside, its adapters, and short ways to ask it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import adapter_root
import httpx
import tiny_model
from harness import STRICT, Request, Server, serve
from lifecycle import OK, save_versions
from typer.testing import CliRunner

from sglang_graft.cli.app import app

CONFLICT, UNAUTHORIZED = 409, 401
KEY = "secret"
POOL_PAGES, PAGE_TOKENS = 80, 16
VERSIONS = [f"v{number}" for number in range(8)]  # 12 pages each
SHORT = tiny_model.prompt(40, seed=5)
ROOT_NAME = "team/legal"
RUN = CliRunner()


def save_root(folder: Path) -> Path:
    """Below it: `made/v0` to `made/v7` to load from by path, and `team/legal` to load by name."""
    save_versions(folder / "made", VERSIONS)
    adapter_root.put(folder / ROOT_NAME, folder / "made/v7")
    return folder


def folders_below(root: Path) -> dict[str, Path]:
    """The versions by name."""
    return {name: root / "made" / name for name in VERSIONS}


@contextmanager
def controlled(base_model: Path, root: Path, folder: Path) -> Iterator[Server]:
    """A server over `root`, asked with its admin key."""
    flags = ["--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(POOL_PAGES * PAGE_TOKENS)]
    flags += ["--served-model-name", "base", "--admin-api-key", KEY]
    flags += ["--graft-adapter-root", str(root), "--graft-adapter-scan-seconds", "0.2"]
    with serve(base_model, folder, *flags, env=STRICT) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        yield running


def clean(server: Server) -> None:
    """Take away aliases, adapters and requests; every page must be free then."""
    server.settle()
    send(server, "PATCH", "/graft/aliases", dict.fromkeys(send(server, "GET", "/graft/aliases")))
    for row in send(server, "GET", "/graft/adapters")["adapters"]:
        send(server, "DELETE", f"/graft/adapters/{row['name']}")
    server.flush()
    pool = server.pool()
    assert pool["pages"]["free"] == pool["pages"]["total"]


def answer(server: Server, method: str, path: str, body: Any = None) -> httpx.Response:
    return server.client.request(method, server.url + path, json=body)


def send(server: Server, method: str, path: str, body: Any = None) -> Any:
    """The JSON of an answer that must be a success."""
    response = answer(server, method, path, body)
    assert response.status_code == OK, response.text
    return response.json()


def refused(server: Server, method: str, path: str, body: Any = None) -> tuple[int, str]:
    response = answer(server, method, path, body)
    assert response.status_code != OK, response.text
    return response.status_code, response.json()["message"]


def load(server: Server, name: str, folder: Path, **more: Any) -> Any:
    body = {"name": name, "path": str(folder), **more}
    return send(server, "POST", "/graft/adapters", body)


def row(server: Server, name: str) -> dict[str, Any]:
    found: dict[str, Any] = send(server, "GET", f"/graft/adapters/{name}")
    return found


def graft(server: Server, *line: str) -> Any:
    """Run a command against the server."""
    return RUN.invoke(app, [*line, "--url", server.url, "--key", KEY])


def as_json(result: Any) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def fill(server: Server, folders: dict[str, Path]) -> None:
    """Adapters a to f with a prompt each: more than the pool holds."""
    for name, version in zip("abcdef", VERSIONS, strict=False):
        load(server, name, folders[version])
        server.ask(Request(name, tiny_model.prompt(50, seed=9), 4))
    server.settle()
