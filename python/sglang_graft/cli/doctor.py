"""`graft doctor`: would Graft start here, and what would it refuse?"""

import importlib.metadata
import os
from collections.abc import Callable

import psutil
import torch
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from sglang_graft import SGLANG_VERSION
from sglang_graft.config import option_table

_PLUGIN_GROUPS = {"sglang.srt.plugins": "graft", "sglang.srt.platforms": "graft_cpu"}
_REINSTALL = "reinstall it: pip install sglang-graft (or scripts/setup in a checkout)"


class Finding(BaseModel):
    """One thing that was checked."""

    topic: str
    item: str
    healthy: bool
    detail: str
    remedy: str = ""


class Report(BaseModel):
    """All findings, and what a start would refuse."""

    findings: list[Finding]
    refused: dict[str, str]

    @property
    def healthy(self) -> bool:
        """Whether a server with --enable-graft would start."""
        return all(finding.healthy for finding in self.findings)


def _version(name: str, wanted: str | None = None) -> Finding:
    try:
        got = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            topic="version",
            item=name,
            healthy=False,
            detail="not installed",
            remedy=f"pip install {name}" + (f"=={wanted}" if wanted else ""),
        )
    healthy = wanted is None or got == wanted
    remedy = "" if healthy else f"pip install {name}=={wanted}"
    return Finding(topic="version", item=name, healthy=healthy, detail=got, remedy=remedy)


def _entry_points() -> list[Finding]:
    findings = []
    for group, name in _PLUGIN_GROUPS.items():
        found = [point.value for point in importlib.metadata.entry_points(group=group, name=name)]
        findings.append(
            Finding(
                topic="entry point",
                item=f"{group}: {name}",
                healthy=len(found) == 1,
                detail=", ".join(found) or "missing",
                remedy="" if len(found) == 1 else _REINSTALL,
            )
        )
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    listed = not allowed or "graft" in {name.strip() for name in allowed.split(",")}
    findings.append(
        Finding(
            topic="entry point",
            item="SGLANG_PLUGINS",
            healthy=listed,
            detail=allowed or "not set",
            remedy="" if listed else "add graft to SGLANG_PLUGINS, or unset it",
        )
    )
    return findings


def _devices() -> list[Finding]:
    memory = psutil.virtual_memory()
    findings = [
        Finding(
            topic="device",
            item="host",
            healthy=True,
            detail=f"{os.cpu_count()} cores, {memory.available / 2**30:.1f} of"
            f" {memory.total / 2**30:.1f} GiB free",
        )
    ]
    if not torch.cuda.is_available():
        own = os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"
        detail = (
            "no CUDA: SGLang's own CPU engine (SGLANG_USE_CPU_ENGINE=1)"
            if own
            else ("no CUDA: Graft's CPU platform serves (float32, plain torch)")
        )
        remedy = "unset SGLANG_USE_CPU_ENGINE: Graft needs its own CPU platform" if own else ""
        return [
            *findings,
            Finding(topic="device", item="cpu", healthy=not own, detail=detail, remedy=remedy),
        ]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        detail = (
            f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB"
        )
        findings.append(
            Finding(topic="device", item=f"cuda:{index}", healthy=True, detail=f"{detail} free")
        )
    return findings


def _hooks() -> list[Finding]:
    """Signature of each hook's target; importing them is the slow part of `graft doctor`."""
    from sglang_graft.engine import flags, scheduler
    from sglang_graft.engine.hooks import problem
    from sglang_graft.serving import install

    findings = []
    for hook in (*flags.HOOKS, *install.HOOKS, *scheduler.HOOKS):
        found = problem(hook, live=False)
        findings.append(
            Finding(
                topic="hook",
                item=hook.target.removeprefix("sglang.srt."),
                healthy=found is None,
                detail=found or hook.reason,
                remedy="" if found is None else f"pip install sglang=={SGLANG_VERSION}",
            )
        )
    return findings


def examine() -> Report:
    """Look at everything that a start depends on. Does not start anything."""
    steps: list[Callable[[], list[Finding]]] = [_entry_points, _devices]
    findings = [_version("sglang", SGLANG_VERSION), *map(_version, ("torch", "sglang-graft"))]
    for step in steps:
        findings += step()
    refused = {}
    if findings[0].healthy:
        from sglang_graft.engine.refusals import REQUESTED, RESOLVED

        findings += _hooks()
        refused = {row.flag: row.reason for row in (*REQUESTED, *RESOLVED)}
    return Report(findings=findings, refused=refused)


def show(report: Report, console: Console) -> None:
    """Print the report for a person."""
    table = Table(title="graft doctor", show_lines=False)
    for column in ("", "topic", "item", "finding"):
        table.add_column(column, overflow="fold")
    for row in report.findings:
        mark = "[green]ok[/]" if row.healthy else "[red]off[/]"
        table.add_row(mark, row.topic, row.item, row.detail)
    console.print(table)
    options = Table(title="options")
    for column in ("flag", "environment", "default", "meaning"):
        options.add_column(column, overflow="fold")
    for option in option_table():
        options.add_row(option.flag, option.env, str(option.default), option.meaning)
    console.print(options)
    console.print("Refused together with --enable-graft:")
    for flag, reason in report.refused.items():
        console.print(f"  {flag}: {reason}", highlight=False)
    for row in report.findings:
        if not row.healthy:
            console.print(f"[red]{row.item}[/]: {row.detail}. Remedy: {row.remedy}")
    console.print("[green]Graft would start here.[/]" if report.healthy else "[red]Not ready.[/]")
