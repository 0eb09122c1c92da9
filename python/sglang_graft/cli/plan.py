"""`graft plan`: which budget, host memory and replica count meet a goal, and how right it was."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from sglang_graft.sim.capacity import Goal, Model
    from sglang_graft.sim.sizes import Sizes
    from sglang_graft.sim.steps import Steps

Row = dict[str, Any]
_ASSUMED = (
    "By replay: one GPU a replica does one forward at a time, prefill before decode, first come, "
    "first served; docs/plan.md says what is left out."
)


_Source = Annotated[
    str, typer.Argument(help="A workload, a result of graft bench (.json), a history (.jsonl).")
]


def plan_command(  # noqa: PLR0913 (typer: an option is a parameter)
    source: _Source = "",
    gpu_gb: Annotated[float, typer.Option(help="Memory of a GPU, in 1e9 bytes.")] = 141.0,
    base_gb: Annotated[float, typer.Option(help="Base model, graphs, activations.")] = 24.0,
    budget_gb: Annotated[str, typer.Option(help="Tried; default: quarters of what is left.")] = "",
    host_gb: Annotated[str, typer.Option(help="Host memory tried, per replica; 0: none.")] = "0,64",
    replicas: Annotated[str, typer.Option(help="Tried, until the goal is met.")] = "1,2,4,8",
    goal_ms: Annotated[float, typer.Option(help="Time to the first token.")] = 500.0,
    goal_figure: Annotated[str, typer.Option(help="mean, p50 or p99.")] = "mean",
    routing: Annotated[str, typer.Option(help="affinity, least-loaded, ...")] = "affinity",
    policy: Annotated[str, typer.Option(help="cost, elora, lru.")] = "cost",
    model: Annotated[Path | None, typer.Option(help="Base model; default Llama-3.1-8B.")] = None,
    device: Annotated[str, typer.Option(help="With --model: cuda or cpu.")] = "cuda",
    rate: Annotated[float | None, typer.Option(help="First turns a second.")] = None,
    adapters: Annotated[int | None, typer.Option(min=2)] = None,
    requests: Annotated[int, typer.Option(min=2, help="Of a workload.")] = 1000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    prefill_us: Annotated[float, typer.Option(help="For a prompt token.")] = 25.0,
    overhead_ms: Annotated[float, typer.Option(help="For a forward with prompts.")] = 14.0,
    decode_ms: Annotated[float, typer.Option(help="For a decode step.")] = 5.5,
    decode_us: Annotated[float, typer.Option(help="More for each further request in it.")] = 25.0,
    read_gb_s: Annotated[float, typer.Option(help="KV that a decode step reads.")] = 4800.0,
    h2d_gb_s: Annotated[float, typer.Option(help="Host to device.")] = 50.7,
    disk_gb_s: Annotated[float, typer.Option(help="Disk to host.")] = 2.0,
    check: Annotated[Path | None, typer.Option(help="Instead: beside results of a bench.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say what hardware meets a goal for the time to the first token, without a GPU."""
    from sglang_graft.cli.bench import numbers
    from sglang_graft.sim.capacity import plan as search
    from sglang_graft.sim.steps import Steps
    from sglang_graft.sim.workloads import Size

    try:
        if check is not None:
            check_command(check, h2d_gb_s, read_gb_s, as_json)
            return
        goal = _goal(goal_ms, goal_figure)
        workload = workload_of(source, Size(requests=requests, adapters=adapters, rate=rate), seed)
        rates = {"h2d": 1e9 * h2d_gb_s, "disk": 1e9 * disk_gb_s, "prefill_s": 1e-6 * prefill_us}
        steps = Steps(
            prefill_s=1e-3 * overhead_ms,
            decode_s=1e-3 * decode_ms,
            decode_s_per_request=1e-6 * decode_us,
            read_bytes_per_s=1e9 * read_gb_s,
        )
        way = replace(_way(policy, rates, steps, _sizes(model, device)), routing=routing)
        budgets = numbers(budget_gb, "--budget-gb") if budget_gb else quarters(gpu_gb - base_gb)
        counts = [int(count) for count in numbers(replicas, "--replicas")]
        rows = search(workload, budgets, hosts(host_gb), counts, goal, way)
        show(rows, goal_figure, as_json)
    except ValueError as error:
        typer.echo(f"graft plan: {error}", err=True)
        raise typer.Exit(2) from None


def check_command(results: Path, h2d_gb_s: float, read_gb_s: float, as_json: bool) -> None:
    """Predictions beside what was measured. ValueError when nothing was."""
    from sglang_graft.bench.check import check, summary

    found = list(check(results, 1e9 * h2d_gb_s, 1e9 * read_gb_s))
    show_check(found, summary(found), as_json)


def _goal(ms: float, figure: str) -> Goal:
    from sglang_graft.sim.capacity import Figure, Goal

    if figure not in get_args(Figure):
        raise ValueError(f"--goal-figure: wanted mean, p50 or p99, got {figure!r}")
    return Goal(ttft_s=1e-3 * ms, figure=cast(Figure, figure))


def _sizes(model: Path | None, device: str) -> Sizes:
    from sglang_graft.bench.shape import ModelShape
    from sglang_graft.sim.sizes import Sizes

    return Sizes() if model is None else ModelShape.read(model, device).sizes


def _way(policy: str, rates: dict[str, float], steps: Steps, sizes: Sizes) -> Model:
    """`rates`: h2d and disk in bytes a second, prefill_s for a token."""
    from sglang_graft.cache import Rates, make_policy
    from sglang_graft.sim.capacity import Model
    from sglang_graft.sim.compare import Options

    make_policy(policy)  # ValueError for an unknown one, before anything is replayed
    known = Rates(
        h2d_bytes_per_s=rates["h2d"],
        disk_bytes_per_s=rates["disk"],
        prefill_s_per_token=rates["prefill_s"],
    )
    return Model(options=Options(sizes=sizes, rates=known), policy=policy, steps=steps)


def workload_of(source: str, size: Any, seed: int) -> Any:
    """A workload by name, of a measured unit, or from a history. ValueError names the choices."""
    from sglang_graft.bench.units import Load
    from sglang_graft.sim import history
    from sglang_graft.sim.workloads import GENERATORS, generate

    if source in GENERATORS:
        return generate(source, seed=seed, size=size)
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"SOURCE: wanted one of {', '.join(GENERATORS)}, or a file; got {source!r}"
        )
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            return history.workload_of(lines, name=path.stem, seed=seed)
    unit = json.loads(path.read_text()).get("unit")
    if unit is None:
        raise ValueError(f"SOURCE: wanted a unit of graft bench, or a .jsonl history; got {path}")
    return replace(Load(**unit["load"])).workload()


def quarters(left_gb: float) -> list[float]:
    """Four budgets, the last of which is all that is left. ValueError when nothing is."""
    if left_gb <= 0:
        raise ValueError(f"--gpu-gb: wanted more than --base-gb, {-left_gb:g} GB are missing")
    return [left_gb * share / 4 for share in (1, 2, 3, 4)]


def hosts(text: str) -> list[float]:
    """Gigabytes from a list with commas, 0 allowed."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if min(found) < 0:
        raise ValueError(f"--host-gb: wanted numbers of at least 0 with commas, got {text!r}")
    return found


def show(found: Iterable[Row], figure: str, as_json: bool) -> None:
    """Every row, and the cheapest one that meets the goal."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("replicas", "GB", "host GB", "mean ms", "P50", "P99", "hit", "loads", "met"):
        table.add_column(column, justify="right")
    kept = []
    for row in found:
        kept.append(row)
        cells = [f"{row['replicas']}", f"{row['budget_gb']:.1f}", f"{row['host_gb']:g}"]
        if row["problem"]:
            table.add_row(*cells, "does not fit", *[""] * 4, "no")
            continue
        cells += [f"{1e3 * row['ttft_s'][key]:.0f}" for key in ("mean", "p50", "p99")]
        cells += [f"{row['prefix_hit_rate']:.0%}", f"{row['adapter_loads']}"]
        table.add_row(*cells, "yes" if row["met"] else "no")
    best = next((row for row in kept if row["met"]), None)
    if as_json:
        typer.echo(json.dumps({"goal_figure": figure, "rows": kept, "chosen": best}))
        return
    Console().print(table)
    if best is None:
        typer.echo("None of these meets the goal.")
    else:
        typer.echo(
            f"Cheapest that meets the goal: {best['replicas']} replicas with "
            f"{best['budget_gb']:.1f} GB for adapters and KV and {best['host_gb']:g} GB of host "
            "memory each."
        )
    typer.echo(_ASSUMED)


def show_check(found: list[Row], errors: dict[str, float], as_json: bool) -> None:
    """Predicted beside measured, times in ms."""
    if as_json:
        typer.echo(json.dumps({"units": found, "errors": errors}))
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("unit", overflow="fold")
    for column in ("mean ms", "error", "P99", "a token", "hit", "loads"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found:
        guess, real = row["predicted_s"], row["measured_s"]
        table.add_row(
            row["unit"],
            f"{1e3 * guess['mean']:.0f}/{1e3 * real['mean']:.0f}",
            f"{row['error']['mean']:+.0%}",
            f"{1e3 * guess['p99']:.0f}/{1e3 * real['p99']:.0f}",
            f"{1e3 * row['predicted_token_s']:.1f}/{1e3 * row['measured_token_s']:.1f}",
            f"{row['predicted_hit_rate']:.0%}/{row['measured_hit_rate']:.0%}",
            f"{row['predicted_loads']}/{row['measured_loads']}",
        )
    Console().print(table)
    typer.echo("Predicted/measured. a token: mean time for one after the first, in ms.")
    typer.echo(
        f"Relative error of the mean TTFT: median {errors['mean_median']:.0%}, largest "
        f"{errors['mean_largest']:.0%}; of the P99: {errors['p99_median']:.0%}, "
        f"{errors['p99_largest']:.0%}."
    )
