"""Processes of servers: they never outlive us, and end with all of their children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1


def launch(line: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own, which `stop` ends; its output goes to `log`.

    Linux: it ends with the thread that started it, so only a thread that stays may call this.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            line,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    """A run that is killed leaves no server behind that holds the GPU for the next one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def pause(process: subprocess.Popen[bytes]) -> None:
    """Stop a server with its children where they are; nothing happens to one that has ended."""
    _tell(process, signal.SIGSTOP)


def resume(process: subprocess.Popen[bytes]) -> None:
    """Let a paused server go on; nothing happens to one that runs, or has ended."""
    _tell(process, signal.SIGCONT)


def _tell(process: subprocess.Popen[bytes], what: signal.Signals) -> None:
    """All of its group."""
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, what)


def stop(*processes: subprocess.Popen[bytes], limit_s: float = 15.0) -> None:
    """End servers, all at the same time: first kindly, then their whole groups by force.

    Each at most once: its group's number may belong to others afterwards.
    """
    for process in processes:
        process.terminate()
        resume(process)  # a paused one would not hear of it
    deadline = time.monotonic() + limit_s
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
    finally:
        for process in processes:
            _tell(process, signal.SIGKILL)
            process.wait()


@dataclass(slots=True, eq=False)
class Launched:
    """A command that `launch` started, with all of its children; `end` ends it once."""

    process: subprocess.Popen[bytes]
    ended: bool = False

    @property
    def pid(self) -> int:
        """The process above all of its others."""
        return self.process.pid

    def pause(self) -> None:
        """It takes no CPU until `resume`; nothing happens to one that has ended."""
        if not self.ended:
            pause(self.process)

    def resume(self) -> None:
        """Let it go on."""
        if not self.ended:
            resume(self.process)

    def end(self) -> None:
        """Nothing of it is left then."""
        end(self)


def end(*launched: Launched) -> None:
    """End those that have not ended, all at the same time."""
    left = [one for one in launched if not one.ended]
    for one in left:
        one.ended = True
    stop(*(one.process for one in left))


def free_ports(count: int) -> list[int]:
    """Different ports of this machine that nothing listens on."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in found]


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    return free_ports(1)[0]


def tail(log: Path, lines: int = 40) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
