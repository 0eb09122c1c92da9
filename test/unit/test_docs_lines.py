"""Command lines of the documents: each is parsed here, or run as written by an integration test."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from sglang_graft.cli.app import app
from sglang_graft.engine import flags

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Pages whose curl lines an integration test runs as written (test/integration/documents.py).
RUN_AS_WRITTEN = {"clients.md", "control.md", "deploy.md", "tenants.md", "troubleshooting.md"}
SERVE = "python -m sglang.launch_server "


def lines(page: Path) -> Iterator[str]:
    """Every line of a page's code blocks, continued lines as one."""
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        yield from re.sub(r"\\\n\s*", "", block).splitlines()


def mentions(page: Path) -> list[str]:
    """Code within a page's text, which may be a part of a command line."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


def words(line: str) -> list[str]:
    """The words of a line; optional parts of a synopsis are there, variables are "x"."""
    plain = re.sub(r"\$\w+|\$\{[^}]*\}", "x", line)
    return shlex.split(re.sub(r"[\[\]]", " ", plain).replace("...", " "), comments=True)


GRAFT = [line for page in PAGES for line in lines(page) if line.startswith("graft ")]
NAMED = [text for page in PAGES for text in mentions(page) if text.startswith("graft ")]
STARTS = [line for page in PAGES for line in lines(page) if line.startswith(SERVE)]


def command_of(line: str) -> tuple[Any, list[str]]:
    """The command of a line, and its arguments."""
    command: Any = typer.main.get_command(app)
    rest = words(line)[1:]
    while rest and hasattr(command, "commands"):
        assert rest[0] in command.commands, f"{line}: no command {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


@pytest.mark.parametrize("line", GRAFT)
def test_a_graft_line_is_one_that_the_command_takes(line: str) -> None:
    command, rest = command_of(line)
    values = {"TOKENS": "16", "N": "1"}
    assert command.make_context("graft", [values.get(word, word) for word in rest]) is not None


@pytest.mark.parametrize("line", sorted({line for line in NAMED if "|" not in line}))
def test_a_command_that_is_named_has_the_options_that_are_named(line: str) -> None:
    command, rest = command_of(line)
    options = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    named = {word for word in rest if word.startswith("--")}
    assert named <= options, line


def test_lists_of_commands_are_complete() -> None:
    command: Any = typer.main.get_command(app)
    found = [line for line in NAMED if "|" in line]
    assert found
    for line in found:
        group, names = line.split()[1:3]
        assert set(names.split("|")) <= set(command.commands[group].commands), line


@pytest.mark.parametrize("line", STARTS)
def test_a_start_is_one_that_sglang_takes(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    monkeypatch.setattr(flags, "verify", lambda hooks: None)
    flags.add_flags(None, parser)
    parser.parse_args(words(line.removeprefix(SERVE)))
    assert flags._flags.pop("enable") is True
    flags._flags.clear()


def test_every_page_with_requests_is_run_as_written() -> None:
    pages = {
        page.name
        for page in PAGES
        for line in (*lines(page), *mentions(page))
        if line.startswith("curl ")
    }
    assert pages == RUN_AS_WRITTEN


def test_lines_are_found() -> None:
    assert len(GRAFT) > 25
    assert len(NAMED) > 10
    assert len(STARTS) == 3
