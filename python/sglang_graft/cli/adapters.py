"""`graft adapters`: the control routes of a running server as commands.

Exit codes: 0 done; 1 the server refused, or did not do all of it; 2 wrong arguments; 3 nobody
answers.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_graft.cli.control_client import KEY_ENV, URL, URL_ENV, ControlClient, ServerError

app = typer.Typer(no_args_is_help=True, help="Load, pin, warm and unload adapters of a server.")

Name = Annotated[str, typer.Argument(help="The adapter's name.")]
Url = Annotated[str, typer.Option(envvar=URL_ENV, help="The server.")]
Key = Annotated[str, typer.Option(envvar=KEY_ENV, help="The server's admin key.", show_envvar=True)]
Json = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
Ttl = Annotated[float | None, typer.Option(min=0.001, help="Unload when unused for so many s.")]
Priority = Annotated[int | None, typer.Option(min=-16, max=16, help="Higher stays longer.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")]

_MIB = 2**20
REFUSED, NOBODY = 1, 3
WIDE = 200
"""Columns where nobody looks on: a file or a pipe shall get whole names."""


@app.command()
def ls(url: Url = URL, key: Key = "", as_json: Json = False) -> None:
    """List loaded adapters, aliases, and folders that a request could load."""
    with connected(url, key) as client:
        answer = client.adapters()
    if as_json:
        typer.echo(json.dumps(answer))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    console.print(_table(answer["adapters"]))
    for folder in answer["available"]:
        console.print(f"not loaded: {escape(folder['name'])} ({escape(folder['path'])})")


@app.command()
def load(  # noqa: PLR0913 (typer: an option is a parameter)
    name: Name,
    path: Annotated[
        str | None, typer.Argument(help="Folder on the server; none: below an adapter root.")
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it on the device.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="In place of a loaded one.")] = False,
    ttl: Ttl = None,
    priority: Priority = None,
    warm: Annotated[str | None, typer.Option(help="device or host.")] = None,
    dry_run: DryRun = False,
    url: Url = URL,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """Load an adapter, or replace one in place."""
    body: dict[str, Any] = {"name": name, "path": path, "load_inplace": replace, "pinned": pin}
    body |= _given(ttl_seconds=ttl, priority=priority, warm=warm)
    with connected(url, key) as client:
        answer = client.load(body, dry_run=dry_run)
    _finish(answer, as_json, "would load" if dry_run else "loaded", name)


@app.command()
def unload(
    name: Name, dry_run: DryRun = False, url: Url = URL, key: Key = "", as_json: Json = False
) -> None:
    """Unload an adapter; requests under way end on it."""
    with connected(url, key) as client:
        answer = client.unload(name, dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    typer.echo(
        f"{'would unload' if dry_run else 'unloaded'} {name}: {_size(answer['freed_bytes'])} free"
        f" at once, {_size(answer['following_bytes'])} with the last of {answer['requests']}"
        " requests"
    )
    if answer["loaded_again_on_use"]:
        typer.echo("it lies below an adapter root: a request that names it loads it again")


@app.command()
def pin(name: Name, url: Url = URL, key: Key = "", as_json: Json = False) -> None:
    """Keep a loaded adapter on the device."""
    _change(url, key, as_json, name, {"pinned": True}, "pinned")


@app.command()
def unpin(name: Name, url: Url = URL, key: Key = "", as_json: Json = False) -> None:
    """Let a pinned adapter be evicted again."""
    _change(url, key, as_json, name, {"pinned": False}, "unpinned")


@app.command("set")
def set_(
    name: Name,
    ttl: Ttl = None,
    no_ttl: Annotated[bool, typer.Option("--no-ttl", help="It stays until unloaded.")] = False,
    priority: Priority = None,
    url: Url = URL,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """Set the time-to-live or the priority of a loaded adapter."""
    body = _given(ttl_seconds=ttl, priority=priority)
    if no_ttl:
        body["ttl_seconds"] = None
    if not body or (no_ttl and ttl is not None):
        raise typer.BadParameter("give --ttl or --no-ttl, or --priority")
    _change(url, key, as_json, name, body, "changed")


@app.command()
def warm(
    name: Name,
    to: Annotated[str, typer.Option(help="device or host.")] = "device",
    url: Url = URL,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """Bring a loaded adapter to the device now, or to host memory."""
    _change(url, key, as_json, name, {"warm": to}, "warmed")


@app.command()
def why(
    name: Name,
    path: Annotated[str | None, typer.Argument(help="Of an adapter that is not loaded.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="As if it were to be pinned.")] = False,
    url: Url = URL,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """Say whether an adapter would fit on the device now, and what would leave for it."""
    with connected(url, key) as client:
        if path is None:
            answer = client.why(name, pin=pin)
        else:
            answer = client.load({"name": name, "path": path, "pinned": pin}, dry_run=True)
    _finish(answer, as_json, "forecast for", name)


@contextmanager
def connected(url: str, key: str) -> Iterator[ControlClient]:
    """A client whose refusals end the command with their reason."""
    with ControlClient(url, key) as client:
        try:
            yield client
        except ServerError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(NOBODY if error.status_code is None else REFUSED) from None


def _change(url: str, key: str, as_json: bool, name: str, body: dict[str, Any], word: str) -> None:
    with connected(url, key) as client:
        answer = client.change(name, body)
    _finish(answer, as_json, word, name)


def _finish(answer: dict[str, Any], as_json: bool, word: str, name: str) -> None:
    """Print an answer; exit 1 when what was asked for has not happened, or would not."""
    outcome = answer.get("warm", answer)
    fits = outcome.get("done", outcome.get("fits", True))
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        typer.echo(f"{word} {name}" + (f", {_size(answer['bytes'])}" if "bytes" in answer else ""))
        for row in answer.get("left", answer.get("leaves", [])):
            leaving = f"{_size(row['bytes'])} of weights and {_size(row['kv_bytes'])} of KV"
            typer.echo(f"  leaves the device: {', '.join(row['adapters'])}, {leaving}")
        for warning in answer.get("warnings", []):
            typer.echo(f"  warning: {warning}")
        if not fits:
            missing = outcome.get("missing_bytes", 0)
            short = f" ({_size(missing)} too few)" if missing else ""
            typer.echo(f"  does not fit now{short}: {outcome['reason']}", err=True)
    if not fits:
        raise typer.Exit(REFUSED)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="adapters")
    for column in ("name", "state", "aliases"):
        table.add_column(column, no_wrap=column in ("name", "state"))
    for column in ("MiB", "KV MiB", "hits", "idle s", "ttl s", "prio", "pin", "reqs"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        ttl = row["ttl_seconds"]
        table.add_row(
            escape(row["name"]),
            row["state"],
            escape(", ".join(row["aliases"])),
            f"{row['bytes'] / _MIB:.2f}",
            f"{row['kv_bytes'] / _MIB:.2f}",
            str(row["hits"]),
            f"{row['idle_seconds']:.0f}",
            "" if ttl is None else f"{ttl:g}",
            str(row["priority"]),
            "yes" if row["pinned"] else "",
            str(row["requests"]),
        )
    return table


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:.2f} MiB"


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
