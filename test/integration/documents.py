"""Run the lines of a document as they are written, against a server that listens elsewhere."""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from harness import Server, environment

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str, language: str = "bash") -> list[str]:
    """The code blocks of one language in a page of the documents."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_as_written(
    server: Server, lines: str, folder: Path, *, hosts: Iterable[str] = (), **variables: str
) -> str:
    """What the lines print, in a shell that stops at the first that fails.

    `folder` is the working directory, and holds a `graft` command and curl's configuration: curl
    connects to the server where a line says one of `hosts` ("name:port"), and fails where the
    server refuses. `variables` are the shell's.
    """
    address = server.url.removeprefix("http://")
    rules = [f'connect-to = "{host}:{address}"' for host in hosts]
    (folder / ".curlrc").write_text("\n".join(["fail", "silent", "show-error", *rules]))
    command = folder / "graft"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m sglang_graft.cli.app "$@"\n')
    command.chmod(0o755)
    env = environment({"CURL_HOME": str(folder), "GRAFT_URL": server.url, "COLUMNS": "200"})
    env |= variables
    env["PATH"] = f"{folder}:{env['PATH']}"
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", lines],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
