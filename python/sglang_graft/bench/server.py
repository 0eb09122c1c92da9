"""Start servers at the same time, wait until all answer, and always end them with all of their
children."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from sglang_graft.bench.budget import Split
from sglang_graft.bench.peers import Peer
from sglang_graft.bench.process import HOST, Launched, end, free_ports, launch, tail
from sglang_graft.bench.samples import STOCK_PROBE_ENV
from sglang_graft.bench.shape import ModelShape

# SGLang's other LoRA backends are Triton kernels.
_STOCK_BACKEND = {"cpu": "torch_native", "cuda": "csgmv"}


class ServerError(RuntimeError):
    """A server did not start, or not as it was asked to; the text has the end of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How servers are started. `more`: further flags by engine (stock, base, graft), and for all
    of them under "all"; `env`: further variables of their environment."""

    model: Path
    shape: ModelShape
    device: str
    more: Mapping[str, Sequence[str]] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    start_limit_s: float = 600.0


def command(
    peer: Peer, split: Split, adapters: Mapping[str, Path], settings: Settings, port: int
) -> list[str]:
    """The command line of one side."""
    line = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(settings.model)]
    line += ["--host", HOST, "--port", str(port), "--dtype", settings.shape.dtype_name]
    line += ["--max-total-tokens", str(split.kv_tokens), "--enable-cache-report"]
    if peer.engine == "graft" or settings.device == "cuda":
        # Stock SGLang's allocator of larger pages needs a GPU: on a CPU its pages hold one token.
        line += ["--page-size", str(settings.shape.page_tokens)]
    # One request after the other fails where it stands, not the server: logs stay readable.
    line += ["--log-level", "warning", *settings.more.get("all", ())]
    if peer.engine == "graft":
        line += ["--enable-graft"]
    if peer.engine == "stock":
        line += ["--lora-backend", _STOCK_BACKEND[settings.device]]
        line += ["--max-loras-per-batch", str(peer.slots)]
    line += [*peer.flags, *settings.more.get(peer.engine, ())]
    if peer.engine != "base":
        line += ["--lora-paths", *(f"{name}={path}" for name, path in adapters.items())]
    return line


@dataclass(frozen=True, slots=True)
class Start:
    """A server to start. `adapters`: folders by name; `log`: the file for its output."""

    peer: Peer
    split: Split
    adapters: Mapping[str, Path]
    log: Path


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers. start_s: how long it took to; `launched` can pause it, and end it
    before the others."""

    url: str
    start_s: float
    line: tuple[str, ...]
    launched: Launched


@contextmanager
def serving(starts: Sequence[Start], settings: Settings) -> Iterator[list[Running | ServerError]]:
    """Start servers at the same time, and run them until the block ends.

    It begins when none of them is starting any more. Yields for each, in order, the server that
    answers, or why it does not; that one has ended by then.
    """
    found: list[_Child] = []
    try:
        for start, port in zip(starts, free_ports(len(starts)), strict=True):
            line = command(start.peer, start.split, start.adapters, settings, port)
            process = launch(line, start.log, environment(start.peer) | dict(settings.env))
            found.append(_Child(Launched(process), f"http://{HOST}:{port}", start.log, line))
        yield _wait(found, settings.start_limit_s)
    finally:
        end(*(child.launched for child in found))


def environment(peer: Peer) -> dict[str, str]:
    """Ours without Graft's own variables; stock gets the probe."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GRAFT_")}
    # Compiling all of SGLang anew in each of a server's processes takes minutes.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    probe = {} if peer.engine == "graft" else {STOCK_PROBE_ENV: "1"}
    return kept | {"HF_HUB_OFFLINE": "1"} | probe


@dataclass(slots=True)
class _Child:
    """A server that was started and may not answer yet."""

    launched: Launched
    url: str
    log: Path
    line: list[str]
    begun: float = field(default_factory=time.monotonic)

    def look(self, limit_s: float) -> Running | ServerError | None:
        """What became of its start; None as long as it goes on."""
        if healthy(self.url):
            took = time.monotonic() - self.begun
            return Running(self.url, took, tuple(self.line), self.launched)
        code = self.launched.process.poll()
        if code is None and time.monotonic() <= self.begun + limit_s:
            return None
        what = f"was silent {limit_s} s" if code is None else f"ended with code {code}"
        self.launched.end()
        return ServerError(f"{shlex.join(self.line[:40])} ...: the server {what}\n{tail(self.log)}")


def _wait(children: Sequence[_Child], limit_s: float) -> list[Running | ServerError]:
    known: dict[int, Running | ServerError] = {}
    while True:
        for place, child in enumerate(children):
            found = None if place in known else child.look(limit_s)
            if found is not None:
                known[place] = found
        if len(known) == len(children):
            return [known[place] for place in range(len(children))]
        time.sleep(0.5)


def healthy(url: str) -> bool:
    """Whether a server answers there."""
    try:
        return httpx.get(f"{url}/health", timeout=30).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False  # not listening yet
