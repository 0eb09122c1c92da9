"""What the documents say about the code is so: links, flags, messages, files to deploy."""

import ast
import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sglang_graft.config import option_table
from sglang_graft.serving.route_table import TABLE

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [page.name for page in PAGES]
SOURCES = (ROOT / "python", ROOT / "kernels")
# Messages of SGLang and of argparse, in the tables of docs/troubleshooting.md.
OTHERS = {"unrecognized arguments: --enable-graft"}
# Flags of other programs, as they stand in our pages.
FOREIGN = {
    *("--policy", "--assignment-mode", "--health-check-endpoint", "--health-check-interval-secs"),
    *("--health-failure-threshold", "--health-success-threshold", "--max-idle-secs"),
    *("--worker-urls", "--device", "--ulimit", "--shm-size", "--stop-timeout"),
    *("--system", "--home-dir", "--now"),
}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_pages_that_are_named_are_there(page: Path) -> None:
    for target in re.findall(
        r"`((?:docs|deploy|scripts|test|benchmark)/[\w./-]+)`", page.read_text()
    ):
        assert (ROOT / target).exists(), f"{page.name} names {target}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_flags_of_ours_exist(page: Path) -> None:
    flags = {row.flag for row in option_table()} | {"--graft-args"}  # the latter of graft bench
    for flag in re.findall(r"--(?:enable-)?graft[\w-]*", page.read_text()):
        assert flag in flags or any(f.startswith(flag) for f in flags), f"{page.name}: {flag}"


def test_every_flag_has_its_line() -> None:
    text = (ROOT / "docs/flags.md").read_text()
    for row in option_table():
        assert f"| `{row.flag}` | `{row.env}` |" in text


def test_routes_exist() -> None:
    paths = "|".join(re.escape(path) for path in ("/graft/", "/health/"))
    for page in PAGES:
        for route in re.findall(rf"(?<![\w.])(?:{paths})[a-z_]+", page.read_text()):
            known = route in TABLE or any(path.startswith(route + "/{") for path in TABLE)
            assert known, f"{page.name}: {route}"


def literals(tree: ast.Module) -> Iterator[str]:
    """Every text in a module; what an f-string or %-format fills in is a zero byte."""
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            yield re.sub(r"%[a-z]", "\0", node.value)


def messages() -> list[str]:
    """The first column of each table of docs/troubleshooting.md whose head is `message`, and
    messages in the other tables."""
    text = (ROOT / "docs/troubleshooting.md").read_text()
    found, is_table = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and cells[0] == "message":
            is_table = True
        elif not cells:
            is_table = False
        elif is_table and cells[0].startswith("`"):
            found.append(cells[0].strip("`"))
    return [*found, "Draining: ... requests are aborted", "--graft-warm: ... cannot answer"]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    found: list[str] = []
    for source in SOURCES:
        for path in source.rglob("*.py"):
            found += literals(ast.parse(path.read_text(encoding="utf-8")))
    return found


def stands_in(message: str, text: str) -> bool:
    """Whether the parts of a message stand in a text, in order."""
    at = 0
    for part in (part.strip() for part in message.split("...")):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def test_there_are_messages_to_look_for() -> None:
    assert len(messages()) > 30
    assert not stands_in("a ... c", "c\0a")
    assert stands_in("a ... c", "a\0c")


@pytest.mark.parametrize("message", [m for m in messages() if m not in OTHERS])
def test_a_quoted_message_is_one_of_ours(texts: list[str], message: str) -> None:
    assert any(stands_in(message, text) for text in texts)


def first_column(page: str, heading: str) -> str:
    """The first cells of all rows below a heading, up to the next one."""
    text = (ROOT / page).read_text().partition(f"## {heading}")[2].partition("\n## ")[0]
    return "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))


def test_every_lora_flag_of_sglang_is_in_the_migration() -> None:
    from sglang.srt.server_args import ServerArgs

    fields = {field.name for field in dataclasses.fields(ServerArgs) if "lora" in field.name}
    assert len(fields) > 10
    column = first_column("docs/migration.md", "From stock SGLang 0.5.17")
    for field in fields:
        assert f"`--{field.replace('_', '-')}`" in column
    named = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]*lora[a-z-]*)`", column)}
    assert named == fields


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    ours = {row.flag for row in option_table()}
    return ours | {flag for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize("name", ["deploy.md", "tuning.md", "troubleshooting.md"])
def test_flags_of_sglang_exist(known_flags: set[str], name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    for flag in set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)) - FOREIGN:
        assert any(known.startswith(flag.rstrip("-")) for known in known_flags), f"{name}: {flag}"


def test_the_example_configuration_has_flags_that_exist(known_flags: set[str]) -> None:
    options = yaml.safe_load((ROOT / "deploy/server.yaml").read_text())
    assert {f"--{name}" for name in options} <= known_flags
    assert options["graft-drain-notice-seconds"] <= options["graft-drain-seconds"]


def unit() -> dict[str, str]:
    lines = (ROOT / "deploy/graft.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_the_unit_lets_a_drain_end() -> None:
    from sglang_graft.serving import drain

    after = drain.ABORT_SECONDS + drain.SCHEDULER_SECONDS + drain.CLOSE_SECONDS
    assert after == 25, "docs/deploy.md says so"
    options = yaml.safe_load((ROOT / "deploy/server.yaml").read_text())
    assert unit()["KillMode"] == "mixed"
    assert int(unit()["TimeoutStopSec"]) >= options["graft-drain-seconds"] + after
    assert f":{options['port']}/health/ready" in unit()["ExecStartPost"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    text = (ROOT / "deploy/graft.service").read_text()
    copy = tmp_path / "graft.service"
    copy.write_text(text.replace("/opt/graft/.venv/bin/python", sys.executable))
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_container_file_copies_what_is_there() -> None:
    text = (ROOT / "deploy/Containerfile").read_text()
    for line in re.findall(r"^COPY (.*)", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
