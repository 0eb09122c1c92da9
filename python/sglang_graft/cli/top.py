"""`graft top`: what the page at `/graft` shows, in a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import httpx
import typer
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

_PARTS = (
    ("adapter", "weights", "cyan"),
    ("kv_cached", "cached KV", "blue"),
    ("kv_running", "running KV", "white"),
    ("in_flight", "in flight", "yellow"),
    ("free", "free", "bright_black"),
)
_REASONS = {
    "request": "for a request",
    "adapter": "for an adapter",
    "promotion": "for KV from the host",
    "pin": "for a pinned adapter",
    "unload": "unloaded or replaced",
    "flush": "flushed",
}
LEFT_SHOWN = 6
TIMEOUT_SECONDS = 10.0


def fetch(client: httpx.Client, url: str, key: str) -> dict[str, Any]:
    """The overview of a server. httpx.HTTPError when it does not answer, or not with one."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = client.get(f"{url.rstrip('/')}/graft/overview", headers=headers)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def rates(
    now: dict[str, Any], before: dict[str, Any] | None, seconds: float
) -> dict[str, float | None]:
    """Requests, errors, loads and evictions a second; None without an answer from before.

    A counter that fell belongs to a server that began anew.
    """
    found: dict[str, float | None] = dict.fromkeys(("requests", "errors", "loads", "evictions"))
    if before is None or seconds <= 0:
        return found
    old, new = _totals(before), _totals(now)
    for name in found:
        grown = new[name] - old[name]
        found[name] = (grown if grown >= 0 else new[name]) / seconds
    return found


def first_token(now: dict[str, Any], before: dict[str, Any] | None) -> float | None:
    """Mean seconds to the first token since `before` (None: since start), None without any."""
    count, total = _first_tokens(now)
    if before is not None:
        old_count, old_total = _first_tokens(before)
        if count >= old_count:
            count, total = count - old_count, total - old_total
    return total / count if count else None


def _first_tokens(answer: dict[str, Any]) -> tuple[int, float]:
    found = answer["http"]["ttft"].values()
    return sum(sum(row["counts"]) for row in found), sum(row["sum"] for row in found)


def _totals(answer: dict[str, Any]) -> dict[str, int]:
    scheduler, http = answer["scheduler"], answer["http"]
    return {
        "requests": sum(http["requests"].values()),
        "errors": sum(row["count"] for row in http["errors"]),
        "loads": scheduler["host"]["loads"] if scheduler else 0,
        "evictions": sum(row["nodes"] for row in scheduler["evictions"]) if scheduler else 0,
    }


def screen(
    answer: dict[str, Any],
    speed: dict[str, float | None],
    ttft: float | None,
    *,
    rows: int = 20,
) -> RenderableType:
    """Everything as one renderable; `ttft` in seconds, `rows` adapters at most."""
    snapshot = answer["scheduler"]
    if snapshot is None:
        return Text("The scheduler has not answered yet.", style="red")
    parts: list[RenderableType] = [_head(answer, speed, ttft)]
    if answer["http"]["stale"]:
        age = answer["http"]["age"]
        parts.append(Text(f"The scheduler is busy: figures of {age:.0f} s ago.", style="red"))
    return Group(*parts, _pool(snapshot), _adapters(snapshot, rows), _left(snapshot))


def _head(answer: dict[str, Any], speed: dict[str, float | None], ttft: float | None) -> Text:
    shown = [f"{name} {'-' if rate is None else f'{rate:.1f}'}/s" for name, rate in speed.items()]
    under_way = f"{answer['http']['in_flight']} under way"
    first = f"first token {'-' if ttft is None else f'{1000 * ttft:.0f} ms'}"
    line = "  ".join([*shown, under_way, first])
    return Text.assemble(("Graft ", "bold"), (answer["model"], "dim"), "  ", line)


def _pool(snapshot: dict[str, Any]) -> Table:
    pages = snapshot["pages"]
    mib = snapshot["page_bytes"] / 2**20
    table = Table(title=f"pool: {pages['total']} pages of {mib:.2f} MiB", title_justify="left")
    table.add_column("pages")
    table.add_column("", justify="right")
    table.add_column("", ratio=1, min_width=20)
    for key, name, color in _PARTS:
        bar = Bar(size=max(pages["total"], 1), begin=0, end=pages[key], color=color)
        table.add_row(name, str(pages[key]), bar)
    invalid = snapshot["invalid_kv_pages"]
    table.add_row("invalid KV", str(invalid), "", style="red bold" if invalid else "dim")
    return table


def _adapters(snapshot: dict[str, Any], rows: int) -> Table:
    known, shown = snapshot["adapters_known"] + 1, snapshot["adapters_shown"][:rows]
    title = f"{len(shown)} of {known} adapters, the last used first"
    table = Table(title=title, title_justify="left")
    table.add_column("adapter", overflow="fold")
    table.add_column("where")
    for name in ("weights", "KV", "KV on host", "last use"):
        table.add_column(name, justify="right")
    for row in shown:
        marks = "".join(mark for mark, on in ((" *", row["locked"]), (" ^", row["pinned"])) if on)
        ago = snapshot["clock"] - row["last_use"]
        table.add_row(
            Text(_name(row["names"], row["identity"]) + marks),
            row["state"],
            str(row["pages"]),
            str(row["kv_pages"]),
            str(row["host_kv_pages"]),
            f"{ago} steps ago" if row["last_use"] else "never",
        )
    table.caption, table.caption_justify = "* in use  ^ pinned", "left"
    return table


def _left(snapshot: dict[str, Any]) -> Table:
    table = Table(title="left last", title_justify="left")
    for name in ("time", "adapter", "what", "why"):
        table.add_column(name, overflow="fold")
    table.add_column("pages", justify="right")
    for row in snapshot["departures"][:LEFT_SHOWN]:
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(row["at"])),
            Text(_name([row["name"]] if row["name"] else [], row["identity"])),
            "weights" if row["what"] == "adapter" else "KV",
            _REASONS[row["reason"]],
            str(row["pages"]),
        )
    return table


def _name(names: list[str], identity: str | None) -> str:
    return ", ".join(names) or ("(base model)" if identity is None else identity[:10])


def watch(
    ask: Callable[[], dict[str, Any]],
    console: Console,
    *,
    interval: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Draw until interrupted; go on when the server is away for a while."""
    before, at = None, now()
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            try:
                answer = ask()
            except httpx.HTTPError as error:
                live.update(Text(f"{error}. Trying again.", style="red"), refresh=True)
            else:
                moment = now()
                rows = max(3, console.height - 26)
                speed = rates(answer, before, moment - at)
                seen = screen(answer, speed, first_token(answer, before), rows=rows)
                live.update(seen, refresh=True)
                before, at = answer, moment
            sleep(interval)


def top(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:30000",
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one look as JSON and end.")
    ] = False,
    key: Annotated[
        str, typer.Option(envvar="GRAFT_ADMIN_KEY", help="The server's admin key, if it has one.")
    ] = "",
) -> None:
    """Show what the pool of a running server does, again and again."""
    console = Console()
    with httpx.Client(timeout=TIMEOUT_SECONDS) as client:
        if not (once or as_json):
            try:
                watch(lambda: fetch(client, url, key), console, interval=interval)
            except KeyboardInterrupt:
                return
        try:
            answer = fetch(client, url, key)
        except httpx.HTTPError as error:
            typer.echo(f"{url}: {error}. Is a server with --enable-graft running there?", err=True)
            raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        console.print(screen(answer, rates(answer, None, 0), first_token(answer, None)))
