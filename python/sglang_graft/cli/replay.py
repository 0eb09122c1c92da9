"""`graft replay`: options in, rows and a plot out."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from sglang_graft.sim.compare import Options, compare
from sglang_graft.sim.workloads import GENERATORS, Size

Row = dict[str, Any]
# New objects between two searches for cycles; Python's own figure is 700.
_OBJECTS = 20_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Search for cycles rarely meanwhile: a trace is a million objects without any."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def budgets(text: str) -> list[float]:
    """Gigabytes from a list with commas; ValueError when one is no number above 0."""
    found = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = 0.0
        if not value > 0:
            raise ValueError(f"--budget-gb: wanted numbers above 0 with commas, got {text!r}")
        found.append(value)
    return found


def workloads(name: str) -> list[str]:
    """The named workload, or every one for `all`."""
    return list(GENERATORS) if name == "all" else [name]


def rows(
    names: Sequence[str],
    policies: Sequence[str],
    budgets_gb: Sequence[float],
    *,
    seed: int,
    size: Size,
    options: Options,
) -> Iterator[Row]:
    """The rows of every workload, as they are ready."""
    for name in names:
        yield from compare(name, policies, budgets_gb, seed=seed, size=size, options=options)


def show(found: Iterable[Row], console: Console) -> list[Row]:
    """Print a table; returns its rows."""
    table = Table(
        title="Seconds of copies, reads and prefill",
        box=box.SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in ("workload", "policy"):
        table.add_column(column, no_wrap=True)
    for column in ("GB", "cost s", "best s", "ratio", "hit", "host", "loads", "TTFT ms"):
        table.add_column(column, justify="right", no_wrap=True)
    kept = []
    for row in found:
        kept.append(row)
        prompt = row["prompt_tokens"]
        table.add_row(
            row["workload"],
            row["policy"],
            f"{row['budget_gb']:g}",
            f"{row['cost_seconds']:.2f}",
            "-" if row["optimum_seconds"] is None else f"{row['optimum_seconds']:.2f}",
            "-" if row["ratio"] is None else f"{row['ratio']:.3f}",
            f"{row['device_tokens'] / prompt:.0%}",
            f"{row['host_tokens'] / prompt:.0%}",
            str(row["adapter_loads"]),
            f"{1e3 * row['ttft_mean_s']:.1f}",
        )
    console.print(table)
    return kept


def echo(found: Iterable[Row]) -> list[Row]:
    """Print each row as a line of JSON as soon as it is ready; returns them."""
    kept = []
    for row in found:
        kept.append(row)
        typer.echo(json.dumps(row))
    return kept


def plot(found: Sequence[Row], path: Path) -> None:
    """Cost over budget, one panel a workload, one line a policy and one for the optimum.

    ValueError when matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot: wanted matplotlib; pip install 'sglang-graft[plot]'") from None
    names = list(dict.fromkeys(row["workload"] for row in found))
    figure = Figure(figsize=(4 * len(names), 3.5), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        own = [row for row in found if row["workload"] == name]
        for policy in dict.fromkeys(row["policy"] for row in own):
            line = [row for row in own if row["policy"] == policy]
            panel.plot(
                _column(line, "budget_gb"), _column(line, "cost_seconds"), "o-", label=policy
            )
        best = [row for row in own if row["policy"] == own[0]["policy"]]
        if best[0]["optimum_seconds"] is not None:
            x, y = _column(best, "budget_gb"), _column(best, "optimum_seconds")
            panel.plot(x, y, "k--", label="optimum (bound)")
        panel.set(title=name, xlabel="adapters + KV, GB", ylabel="seconds", ylim=(0, None))
        panel.legend()
    figure.savefig(path, dpi=120)


def _column(found: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in found]
