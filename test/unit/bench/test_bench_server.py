"""Real processes in place of servers: they start together, and all of them end."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers_bench import save_config

from sglang_graft.bench import server
from sglang_graft.bench.budget import Split
from sglang_graft.bench.peers import parse_peers
from sglang_graft.bench.process import free_ports, launch, stop
from sglang_graft.bench.server import Running, ServerError, Settings, Start, serving
from sglang_graft.bench.shape import ModelShape

# Has a child as SGLang has, and answers /health after a while.
HEALTHY = """
import http.server, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(float(sys.argv[2]))
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
BROKEN = "print('out of memory'); raise SystemExit(3)"
SILENT = "import time; time.sleep(600)"
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    model = save_config(tmp_path / "model")
    return Settings(
        model=model, shape=ModelShape.read(model, "cpu"), device="cpu", start_limit_s=2.0
    )


def starts(folder: Path, *labels: str) -> list[Start]:
    peers = parse_peers(labels)
    return [Start(p, Split(1, 0, 1, 1, ""), {}, folder / f"{p.slug}.log") for p in peers]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Command lines by label, without the port."""
    found: dict[str, list[str]] = {}

    def command(peer: Any, split: Any, adapters: Any, settings: Any, port: int) -> list[str]:
        program, *more = found[peer.label]
        return [sys.executable, "-c", program, str(port), *more]

    monkeypatch.setattr(server, "command", command)
    return found


def group(process: int) -> list[int]:
    """Processes of a group that have not ended."""
    return [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and _group_of(path) == process
    ]


def _group_of(path: Path) -> int | None:
    try:
        state, _, number, *_ = (path / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(number)


def wait_until(condition: Callable[[], bool]) -> None:
    """What is killed takes a moment to go."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def groups() -> list[int]:
    """Groups of ours: each server leads one."""
    me = os.getpid()
    children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    return [int(child) for child in children if os.getpgid(int(child)) == int(child)]


def states(process: int) -> set[str]:
    """States of the processes of a group, as ps names them."""
    found = set()
    for pid in group(process):
        found.add(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
    return found


def test_a_paused_server_stands_still_with_its_child_and_ends_when_told(
    tmp_path: Path, settings: Settings, programs: dict[str, list[str]]
) -> None:
    programs |= {"base": [HEALTHY, "0"]}
    with serving(starts(tmp_path, "base"), settings) as (base,):
        assert isinstance(base, Running)
        assert len(group(base.launched.pid)) == 2
        base.launched.pause()
        wait_until(lambda: states(base.launched.pid) == {"T"})
        base.launched.resume()
        wait_until(lambda: "T" not in states(base.launched.pid))
        assert httpx.get(f"{base.url}/health").status_code == 200
        base.launched.pause()
        wait_until(lambda: states(base.launched.pid) == {"T"})
        before = time.monotonic()
        base.launched.end()
        assert group(base.launched.pid) == []
        # SIGTERM reached it: who does not hear of that is killed after 15 s.
        assert time.monotonic() - before < 15
        base.launched.pause()  # of one that has ended nothing comes
        base.launched.resume()


def test_all_start_together_and_those_that_do_not_end_alone(
    tmp_path: Path, settings: Settings, programs: dict[str, list[str]]
) -> None:
    programs |= {"base": [HEALTHY, "0.6"], "stock:2": [BROKEN], "graft": [HEALTHY, "0.6"]}
    programs |= {"stock:4": [SILENT]}
    before = time.monotonic()
    with serving(starts(tmp_path, *programs), settings) as found:
        assert time.monotonic() - before >= 2.0  # until the silent one was given up
        base, broken, graft, silent = found
        assert isinstance(broken, ServerError)
        assert "code 3" in str(broken)
        assert "out of memory" in str(broken)
        assert isinstance(silent, ServerError)
        assert "silent 2.0 s" in str(silent)
        assert isinstance(base, Running)
        assert isinstance(graft, Running)
        assert base.url != graft.url
        assert base.start_s >= 0.6
        alive = groups()
        assert len(alive) == 2
        wait_until(lambda: [len(group(number)) for number in alive] == [2, 2])
        base.launched.end()
        base.launched.end()  # nothing more
        wait_until(lambda: [len(group(number)) for number in alive] == [0, 2])
    wait_until(lambda: [len(group(number)) for number in alive] == [0, 0])


@pytest.mark.parametrize("how", [SystemExit, KeyboardInterrupt, ValueError])
def test_whatever_ends_the_block_ends_all(
    how: type[BaseException], tmp_path: Path, settings: Settings, programs: dict[str, list[str]]
) -> None:
    programs |= {"base": [HEALTHY, "0"], "graft": [HEALTHY, "0"]}
    alive: list[int] = []

    def use() -> None:
        with serving(starts(tmp_path, *programs), settings):
            alive.extend(groups())
            raise how

    with pytest.raises(how):
        use()
    assert len(alive) == 2
    wait_until(lambda: [group(number) for number in alive] == [[], []])


def test_the_signal_to_end_may_come_while_servers_start(
    tmp_path: Path, settings: Settings, programs: dict[str, list[str]]
) -> None:
    programs |= {"base": [HEALTHY, "0"], "graft": [SILENT]}
    alive: list[int] = []

    def told(number: int, frame: object) -> None:
        alive.extend(groups())
        raise SystemExit(128 + number)

    def tell() -> None:
        wait_until(lambda: len(groups()) == 2)
        time.sleep(0.5)  # the second one's start has returned by then: it waits for both
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, told)
    patient = dataclasses.replace(settings, start_limit_s=600)
    thread = threading.Thread(target=tell)
    thread.start()
    try:
        with pytest.raises(SystemExit), serving(starts(tmp_path, *programs), patient):
            raise AssertionError("the block must not begin")
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, before)
    assert len(alive) == 2
    wait_until(lambda: [group(number) for number in alive] == [[], []])


def test_a_server_that_does_not_listen_is_ended_by_force(tmp_path: Path) -> None:
    logs = [tmp_path / "one", tmp_path / "two"]
    processes = [launch([sys.executable, "-c", DEAF], log, os.environ) for log in logs]
    wait_until(lambda: all("up" in log.read_text() for log in logs))
    stop(*processes, limit_s=0.3)
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


def test_a_server_ends_with_the_run_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import os, sys
from pathlib import Path
from sglang_graft.bench.process import launch
child = launch([sys.executable, "-c", {SILENT!r}], Path({str(tmp_path / "log")!r}), os.environ)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    number = int(done.stdout)
    wait_until(lambda: not group(number))


def test_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20
