"""`graft sync`: bring a server to what a file wants, once, or whenever one of them changes.

Exit codes: 0 done, or nothing to do; 1 refused, or failed and back to what was before; 2 the file
is wrong; 3 nobody answers; 4 failed, and not all of what was before could be put back.
"""

import dataclasses
import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from sglang_graft.cli.control_client import (
    API_KEY_ENV,
    KEY_ENV,
    URL,
    URL_ENV,
    ControlClient,
    ServerError,
)
from sglang_graft.cli.sync_apply import Outcome, apply
from sglang_graft.cli.sync_file import SyncFileError, read_file
from sglang_graft.cli.sync_plan import Plan, make_plan

DONE, FAILED, WRONG_FILE, NOBODY, LOST = 0, 1, 2, 3, 4


@dataclasses.dataclass(frozen=True)
class Options:
    """How to compare, and what to print."""

    dry_run: bool
    prune: bool
    reread: bool
    as_json: bool


def sync(  # noqa: PLR0913 (typer: an option is a parameter)
    file: Annotated[Path, typer.Argument(help="YAML: adapters, aliases for them, tenants.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, and stop.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Again when FILE changes or the server restarts.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Unload adapters, drop aliases that FILE lacks.")
    ] = False,
    reread: Annotated[
        bool, typer.Option("--reread", help="Also look for new weights below the same path.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
    url: Annotated[str, typer.Option(envvar=URL_ENV, help="The server.")] = URL,
    key: Annotated[str, typer.Option(envvar=KEY_ENV, help="The server's admin key.")] = "",
    api_key: Annotated[
        str, typer.Option(envvar=API_KEY_ENV, help="Its API key, for warm-up prompts.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each run.")] = False,
) -> None:
    """Load, pin, warm up and switch what FILE wants; print the plan first.

    Nothing is asked: look at --dry-run before. A step that fails takes all others back.
    """
    options = Options(dry_run, prune, reread, as_json)
    with ControlClient(url, key, api_key=api_key) as client:
        start = functools.partial(_watch, interval=interval) if watch else run
        code = start(client, file, options)
    raise typer.Exit(code)


def run(client: ControlClient, file: Path, options: Options) -> int:
    """One comparison, and what follows from it; the exit code."""
    try:
        desired = read_file(file)
    except SyncFileError as error:
        return _fail(str(error), WRONG_FILE, options)
    try:
        plan = make_plan(client, desired, prune=options.prune, reread=options.reread)
    except ServerError as error:
        return _fail(str(error), NOBODY if error.status_code is None else FAILED, options)
    if not options.as_json:
        _show(plan)
    if plan.refusals:
        return _end(plan, None, FAILED, options)
    if options.dry_run or not plan.steps:
        return _end(plan, None, DONE, options)
    tell = _say_nothing if options.as_json else typer.echo
    outcome = apply(client, plan, tell)
    code = DONE if outcome.error is None else LOST if outcome.lost else FAILED
    return _end(plan, outcome, code, options)


def _watch(client: ControlClient, file: Path, options: Options, interval: float) -> int:
    """Until somebody ends the command, as a service manager does; half a run is taken back then."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server = client.instance()
        _follow(client, file, options, interval, run(client, file, options), server)
    except KeyboardInterrupt:
        return DONE


def _follow(
    client: ControlClient,
    file: Path,
    options: Options,
    interval: float,
    code: int,
    server: str | None,
) -> NoReturn:
    """Run again when the file has changed, when the server has restarted, while nobody answers.

    `code` is what the last run came to, `server` the instance that it found.
    """
    seen = _signature(file)
    while True:
        time.sleep(interval)
        now, instance = _signature(file), client.instance()
        restarted = instance is not None and instance != server
        if now != seen or restarted or code == NOBODY:
            seen, server = now, instance or server
            code = run(client, file, options)


def _signature(file: Path) -> tuple[int, int, int] | None:
    try:
        at = os.stat(file)
    except OSError:
        return None
    return at.st_ino, at.st_size, at.st_mtime_ns


def _say_nothing(_: str) -> None:
    """--json prints one object at the end."""


def _show(plan: Plan) -> None:
    for step in plan.steps:
        typer.echo(f"plan: {step}")
        forecast = getattr(step, "forecast", {})
        for row in forecast.get("leaves", []):
            typer.echo(f"plan:   on the device it would take the room of {row['adapters'][0]}")
        if forecast.get("reason"):
            typer.echo(f"plan:   it does not fit there now: {forecast['reason']}")
    if not plan.steps and not plan.refusals:
        typer.echo("nothing to do")


def _fail(message: str, code: int, options: Options) -> int:
    if options.as_json:
        typer.echo(json.dumps({"plan": [], "error": message, "code": code}))
    else:
        typer.echo(message, err=True)
    return code


def _end(plan: Plan, outcome: Outcome | None, code: int, options: Options) -> int:
    if options.as_json:
        answer: dict[str, Any] = {
            "plan": [str(step) for step in plan.steps],
            "refusals": plan.refusals,
            **(dataclasses.asdict(outcome) if outcome is not None else {}),
            "code": code,
        }
        typer.echo(json.dumps(answer))
        return code
    for refusal in plan.refusals:
        typer.echo(f"refused: {refusal}", err=True)
    if outcome is not None and outcome.error is None:
        typer.echo("done")
    elif outcome is not None:
        state = "NOT all is as it was before" if outcome.lost else "all is as it was before"
        typer.echo(f"{outcome.error}; {state}", err=True)
    return code
