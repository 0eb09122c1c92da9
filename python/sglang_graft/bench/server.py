"""Start one side's server, wait until it answers, and always end it with all of its children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from sglang_graft.bench.budget import Split
from sglang_graft.bench.peers import Peer
from sglang_graft.bench.samples import STOCK_PROBE_ENV
from sglang_graft.bench.shape import ModelShape

HOST = "127.0.0.1"
_STOP_S = 15.0
_LOG_LINES = 40
_PR_SET_PDEATHSIG = 1
# SGLang's other LoRA backends are Triton kernels.
_STOCK_BACKEND = {"cpu": "torch_native", "cuda": "csgmv"}


class ServerError(RuntimeError):
    """A server did not start, or not as it was asked to; the text has the end of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How servers are started. `more`: further flags by engine (stock, base, graft), and for all
    of them under "all"."""

    model: Path
    shape: ModelShape
    device: str
    more: Mapping[str, Sequence[str]] = field(default_factory=dict)
    start_limit_s: float = 600.0


def command(
    peer: Peer, split: Split, adapters: Mapping[str, Path], settings: Settings, port: int
) -> list[str]:
    """The command line of one side."""
    line = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(settings.model)]
    line += ["--host", HOST, "--port", str(port), "--dtype", settings.shape.dtype_name]
    line += ["--max-total-tokens", str(split.kv_tokens), "--enable-cache-report"]
    # One request after the other fails where it stands, not the server: logs stay readable.
    line += ["--log-level", "warning", *settings.more.get("all", ())]
    if peer.engine == "graft":
        line += ["--enable-graft", "--page-size", str(settings.shape.page_tokens)]
    if peer.engine == "stock":
        line += ["--lora-backend", _STOCK_BACKEND[settings.device]]
        line += ["--max-loras-per-batch", str(peer.slots)]
    line += [*peer.flags, *settings.more.get(peer.engine, ())]
    if peer.engine != "base":
        line += ["--lora-paths", *(f"{name}={path}" for name, path in adapters.items())]
    return line


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    url: str
    log: Path
    start_s: float
    line: tuple[str, ...]

    def tail(self) -> str:
        """The end of its log."""
        return tail(self.log)


@contextmanager
def serving(
    peer: Peer, split: Split, adapters: Mapping[str, Path], settings: Settings, log: Path
) -> Iterator[Running]:
    """Run the server of `peer` until the block ends. ServerError when it does not start."""
    port = free_port()
    line = command(peer, split, adapters, settings, port)
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            line,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(peer),
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    url = f"http://{HOST}:{port}"
    try:
        _wait(process, url, log, settings.start_limit_s, line)
        yield Running(url, log, time.monotonic() - start, tuple(line))
    finally:
        stop(process)


def _die_with_parent() -> None:
    """Linux: a run that is killed leaves no server behind that holds the GPU for the next one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def environment(peer: Peer) -> dict[str, str]:
    """Ours without Graft's own variables; stock gets the probe."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GRAFT_")}
    # Compiling all of SGLang anew in each of a server's processes takes minutes.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    probe = {} if peer.engine == "graft" else {STOCK_PROBE_ENV: "1"}
    return kept | {"HF_HUB_OFFLINE": "1"} | probe


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
    return port


def tail(log: Path) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server: first kindly, then its whole group by force."""
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(
    process: subprocess.Popen[bytes], url: str, log: Path, limit_s: float, line: Sequence[str]
) -> None:
    deadline = time.monotonic() + limit_s
    while not _healthy(url):
        ended = process.poll() is not None
        if ended or time.monotonic() > deadline:
            what = f"ended with code {process.returncode}" if ended else f"was silent {limit_s} s"
            shown = shlex.join([*line[:1], *line[1:40]])
            raise ServerError(f"{shown} ...: the server {what}\n{tail(log)}")
        time.sleep(0.5)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=30).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False  # not listening yet
