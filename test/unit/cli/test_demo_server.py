"""The demo's server process: started, watched, and never left behind."""

import os
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from sglang_graft.bench.process import free_port
from sglang_graft.cli.demo_server import ServerError, command, running

QUIET = Console(quiet=True)
# Answers 200 to everything below the folder that it serves, and has a child, as SGLang has.
SERVER = """
import http.server, pathlib, subprocess, sys
port, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / "child").write_text(str(child.pid))
(folder / "health").touch()
handler = lambda *a: http.server.SimpleHTTPRequestHandler(*a, directory=folder)
http.server.ThreadingHTTPServer(("127.0.0.1", port), handler).serve_forever()
"""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the temporary folders of the server's log come to lie."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def is_running(pid: int) -> bool:
    """False for a zombie too: it has ended, and only waits for its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def serve(folder: Path, port: int) -> list[str]:
    return [sys.executable, "-c", SERVER, str(port), str(folder)]


def test_the_whole_group_ends_and_the_log_goes(tmp_path: Path, scratch: Path) -> None:
    port = free_port()
    with running(serve(tmp_path, port), port=port, deadline_s=60, console=QUIET) as url:
        assert url == f"http://127.0.0.1:{port}"
        child = int((tmp_path / "child").read_text())
        assert is_running(child)
        assert os.getpgid(child) != os.getpgid(0)
    assert ends(child)
    assert list(scratch.iterdir()) == []


def test_an_error_of_the_caller_ends_the_server_too(tmp_path: Path, scratch: Path) -> None:
    def use_badly(port: int) -> None:
        with running(serve(tmp_path, port), port=port, deadline_s=60, console=QUIET):
            raise KeyError

    with pytest.raises(KeyError):
        use_badly(free_port())
    assert ends(int((tmp_path / "child").read_text()))


def test_a_server_that_ends_at_start_shows_its_log(scratch: Path) -> None:
    line = [sys.executable, "-c", "import sys; print('no such flag'); sys.exit(3)"]
    with (
        pytest.raises(ServerError, match=r"(?s)code 3 at start.*no such flag"),
        running(line, port=free_port(), deadline_s=60, console=QUIET),
    ):
        pytest.fail("must not be reached")
    assert [path.name for path in scratch.rglob("*.log")] == ["server.log"]


def test_a_server_that_never_answers_meets_the_deadline(scratch: Path) -> None:
    line = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        pytest.raises(ServerError, match="not ready in 0 s"),
        running(line, port=free_port(), deadline_s=0.1, console=QUIET),
    ):
        pytest.fail("must not be reached")


def test_command_names_every_adapter_and_lets_the_user_have_the_last_word() -> None:
    line = command(
        model=Path("m"),
        name="base",
        adapters={"a": Path("x/a"), "b": Path("x/b")},
        port=7,
        extra=["--page-size", "16"],
    )
    assert line[1:3] == ["-m", "sglang.launch_server"]
    assert {"--enable-graft", "--enable-cache-report"} <= set(line)
    at = line.index("--lora-paths")
    assert line[at + 1 :] == ["a=x/a", "b=x/b", "--page-size", "16"]
