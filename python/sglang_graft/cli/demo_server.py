"""Start a real SGLang server with Graft for the demo, wait until it answers, and always stop it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sglang_graft.bench.process import HOST

LOG_LINES = 40
STOP_SECONDS = 15.0
POLL_SECONDS = 0.5


class ServerError(RuntimeError):
    """The server did not start or did not answer as expected; the text says what to look at."""


def command(
    *, model: Path, name: str, adapters: Mapping[str, Path], port: int, extra: Sequence[str]
) -> list[str]:
    """The command line that serves `model` under `name` with `adapters`; `extra` comes last."""
    line = [sys.executable, "-m", "sglang.launch_server"]
    line += ["--model-path", str(model), "--served-model-name", name]
    line += ["--enable-graft", "--enable-cache-report"]
    line += ["--host", HOST, "--port", str(port)]
    line += ["--lora-paths", *(f"{key}={path}" for key, path in adapters.items())]
    return [*line, *extra]


@contextmanager
def running(
    line: Sequence[str], *, port: int, deadline_s: float, console: Console
) -> Iterator[str]:
    """Run `line` until the block ends, and give the server's URL once it is healthy.

    The server gets a process group of its own, which is ended in every case. Its log lies in a
    temporary folder that is kept only after a failure, whose message shows the log's end.
    """
    folder = Path(tempfile.mkdtemp(prefix="graft-demo-"))
    log = folder / "server.log"
    url = f"http://{HOST}:{port}"
    # The model is a folder: asking a hub about it would only cost time where none is reached.
    environment = {"HF_HUB_OFFLINE": "1", **os.environ}
    with log.open("wb") as output:
        process = subprocess.Popen(
            line,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    try:
        _wait_healthy(process, url, log, deadline_s, console)
        try:
            yield url
        except (httpx.HTTPError, ServerError) as error:
            raise ServerError(f"{error}\n{_tail(log)}") from error
    finally:
        _stop(process)
    shutil.rmtree(folder)  # reached only when nothing failed


def _wait_healthy(
    process: subprocess.Popen[bytes], url: str, log: Path, deadline_s: float, console: Console
) -> None:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    deadline = time.monotonic() + deadline_s
    with Progress(*columns, console=console) as progress, httpx.Client(timeout=30) as client:
        task = progress.add_task(f"Starting the server on {url} (a minute or two)", total=None)
        while not _healthy(client, url):
            code = process.poll()
            if code is not None:
                raise ServerError(f"the server ended with code {code} at start\n{_tail(log)}")
            if time.monotonic() > deadline:
                raise ServerError(f"the server was not ready in {deadline_s:.0f} s\n{_tail(log)}")
            time.sleep(POLL_SECONDS)
        progress.update(task, description=f"Server ready on {url}", total=1, completed=1)


def _healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False  # not listening yet, or busy with its first request


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"end of the server's log, {log}:", *lines])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole group: first kindly, then what is left of it by force."""
    _signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass  # the next line does not ask
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # all of it has ended
