"""The page's own arithmetic, run by Node.js."""

import json
import os
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest
from helpers_overview import overview

TESTS = Path(__file__).parent / "page/model.test.mjs"
OLDEST = 18


def node() -> str:
    path = shutil.which("node")
    if path is None:
        pytest.skip("NO NODE.JS: the page's arithmetic is tested in the browser only")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    if int(version.stdout.lstrip("v").split(".")[0]) < OLDEST:
        pytest.skip(f"Node.js {version.stdout.strip()} has no test runner, wanted {OLDEST}")
    return path


def test_the_arithmetic_of_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    shutil.copytree(str(resources.files("sglang_graft.serving") / "page"), folder)
    # The browser is told that these are modules; Node.js wants to read it.
    (folder / "package.json").write_text('{"type": "module"}')
    environment = os.environ | {
        "GRAFT_PAGE": str(folder),
        "GRAFT_OVERVIEW": json.dumps(overview(100)),
    }
    result = subprocess.run(
        [node(), "--test", str(TESTS)], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "# fail 0" in result.stdout or "fail 0" in result.stdout
