"""`graft bench`: measure peers side by side, and report."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    help="Measure stock SGLang and Graft at one budget of bytes, and report.",
)
if TYPE_CHECKING:
    from sglang_graft.bench.run import Plan
    from sglang_graft.bench.server import Settings
    from sglang_graft.bench.shape import ModelShape
    from sglang_graft.bench.units import Load

_CACHE = Path("~/.cache/graft/bench")
_PROTOCOL_RATES: dict[str, list[float | None]] = {"uniform-cold": [4.0, 8.0, 16.0]}
_STATUS_S = 10.0


class Lines:
    """Progress as lines, at most one every ten seconds within a unit."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = self._last = time.monotonic()

    def say(self, text: str) -> None:
        """See bench.run.Progress."""
        self._console.print(
            f"[dim]{time.monotonic() - self._start:6.0f} s[/] {text}",
            highlight=False,
            soft_wrap=True,
        )

    def requests(self, done: int, planned: int, last: object) -> None:
        """See bench.run.Progress."""
        if time.monotonic() - self._last > _STATUS_S:
            self._last = time.monotonic()
            self.say(f"  {done} of {planned} requests sent")


@contextmanager
def _errors(command: str) -> Iterator[None]:
    """Wrong use ends with its reason and code 2."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"graft bench {command}: {error}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def _ends_when_told() -> Iterator[None]:
    """SIGTERM ends the block as an exception does, so that its server is stopped too."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def numbers(text: str, flag: str) -> list[float]:
    """Numbers above 0 with commas. ValueError otherwise."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [0.0]
    if not all(number > 0 for number in found):
        raise ValueError(f"{flag}: wanted numbers above 0 with commas, got {text!r}")
    return found


@app.command("model")
def model_command(
    shape: Annotated[str, typer.Argument(help="llama-3.1-8b, tiny or tiny-deep.")],
    out: Annotated[Path, typer.Option(help="Folder of the model.")],
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write a base model with random weights of a known shape, and a tokenizer."""
    from sglang_graft.bench.make_model import make_model

    with _errors("model"):
        typer.echo(f"wrote {make_model(shape, out, seed=seed)}")


# The options of `graft bench run`.
_Name = Annotated[str, typer.Argument(help="A workload of the protocol, or all.")]
_Model = Annotated[Path, typer.Option(help="Folder of the base model.")]
_Out = Annotated[Path, typer.Option(help="Folder of results; finished units are kept.")]
_Peer = Annotated[
    list[str], typer.Option(help="stock:8,16 or base or graft:cost,lru+no-prefetch; repeat.")
]
_Budget = Annotated[str, typer.Option(help="Bytes for adapters and KV, in 1e9.")]
_Rates = Annotated[str, typer.Option(help="First turns a second; default: protocol.")]
_Seconds = Annotated[float, typer.Option(min=0.1, help="First turns come this long.")]
_Device = Annotated[str, typer.Option(help="cuda or cpu.")]
_Seed = Annotated[int, typer.Option(min=0)]
_Repeats = Annotated[int, typer.Option(min=1, help="With other seeds each.")]
_Adapters = Annotated[int | None, typer.Option(min=2, help="Default: the protocol's.")]
_Requests = Annotated[int | None, typer.Option(min=1, help="At most this many.")]
_Distinct = Annotated[
    int | None,
    typer.Option(min=1, help="Weight files of one rank; more adapters share them, scaled."),
]
_Drain = Annotated[float, typer.Option(min=0, help="Wait for answers this long.")]
_StopAfter = Annotated[float | None, typer.Option(help="Begin no unit that could run past this.")]
_Together = Annotated[
    int, typer.Option(min=1, help="Servers that start at once; they are measured one by one.")
]
_ServerArgs = Annotated[str, typer.Option(help="Flags for all servers.")]
_StockArgs = Annotated[str, typer.Option(help="Flags for stock SGLang.")]
_BaseArgs = Annotated[str, typer.Option(help="Flags for the server without LoRA.")]
_GraftArgs = Annotated[str, typer.Option(help="Flags for Graft.")]
_StartLimit = Annotated[float, typer.Option(help="Give up a start after this.")]
_Retry = Annotated[bool, typer.Option(help="Measure failed units again.")]
_Work = Annotated[Path, typer.Option(help="Adapters and logs.")]
_Commit = Annotated[str, typer.Option(help="Where the tree has no history.")]


@app.command("run")
def run_command(  # noqa: PLR0913 (typer: an option is a parameter)
    name: _Name,
    model: _Model,
    out: _Out,
    peer: _Peer,
    budget_gb: _Budget = "12",
    rates: _Rates = "",
    seconds: _Seconds = 60.0,
    device: _Device = "cuda",
    seed: _Seed = 0,
    repeats: _Repeats = 1,
    adapters: _Adapters = None,
    requests: _Requests = None,
    distinct_weights: _Distinct = None,
    drain_s: _Drain = 60.0,
    stop_after_s: _StopAfter = None,
    start_together: _Together = 1,
    server_args: _ServerArgs = "",
    stock_args: _StockArgs = "",
    base_args: _BaseArgs = "",
    graft_args: _GraftArgs = "",
    start_limit_s: _StartLimit = 600.0,
    retry_failed: _Retry = False,
    work_dir: _Work = _CACHE,
    commit: _Commit = "",
) -> None:
    """Measure what is missing below OUT; the same command again goes on where it stopped."""
    from sglang_graft.bench.peers import parse_peers
    from sglang_graft.bench.run import Plan
    from sglang_graft.bench.units import Load

    load = Load(name=name, rate=None, seconds=seconds, adapters=adapters, most=requests, seed=seed)
    more = {"all": server_args, "stock": stock_args, "base": base_args, "graft": graft_args}
    with _errors("run"), _ends_when_told():
        plan = Plan(
            peers=parse_peers(peer),
            loads=(),
            budgets_gb=numbers(budget_gb, "--budget-gb"),
            drain_s=drain_s,
            distinct=distinct_weights,
        )
        settings = _settings(model, device, more, start_limit_s)
        lots = [[one] for one in _plans(plan, load, rates, repeats)]
        bench = _bench(settings, out, work_dir, commit)
        bench |= {"stop_after_s": stop_after_s, "retry_failed": retry_failed}
        _measure(lots, bench | {"start_together": start_together})


@app.command("campaign")
def campaign_command(  # noqa: PLR0913 (typer: an option is a parameter)
    file: Annotated[Path, typer.Argument(help="Runs, in lots whose servers start together.")],
    model: _Model,
    out: _Out,
    device: _Device = "cuda",
    stop_after_s: _StopAfter = None,
    start_limit_s: _StartLimit = 600.0,
    retry_failed: _Retry = False,
    work_dir: _Work = _CACHE,
    commit: _Commit = "",
) -> None:
    """Measure what is missing of all runs of FILE; the same command again goes on."""
    from sglang_graft.bench.campaign import read_campaign

    with _errors("campaign"), _ends_when_told():
        campaign, lots = read_campaign(file)
        more = {"all": campaign.server_args, "stock": campaign.stock_args}
        more |= {"base": campaign.base_args, "graft": campaign.graft_args}
        settings = _settings(model, device, more, start_limit_s)
        bench = _bench(settings, out, work_dir, commit)
        bench |= {"stop_after_s": stop_after_s, "retry_failed": retry_failed}
        _measure(lots, bench | {"start_together": None})


def _settings(model: Path, device: str, more: dict[str, str], start_limit_s: float) -> Settings:
    """`more`: flags of servers by engine, as one text each."""
    from sglang_graft.bench.server import Settings
    from sglang_graft.bench.shape import ModelShape

    return Settings(
        model=model.resolve(),
        shape=ModelShape.read(model, device),
        device=device,
        more={engine: shlex.split(text) for engine, text in more.items()},
        start_limit_s=start_limit_s,
    )


def _plans(plan: Plan, load: Load, rates: str, repeats: int) -> list[Plan]:
    """`plan` for every workload that `load` names, at every rate and seed."""
    from sglang_graft.cli.replay import workloads

    found = []
    for name in workloads(load.name):
        wanted = _PROTOCOL_RATES.get(name, [None])
        if rates:
            wanted = [*numbers(rates, "--rates")]
        seeds = range(load.seed, load.seed + repeats)
        loads = [replace(load, name=name, rate=r, seed=seed) for seed in seeds for r in wanted]
        found.append(replace(plan, loads=loads))
    return found


def _bench(settings: Settings, out: Path, work_dir: Path, commit: str) -> dict[str, Any]:
    """What every `Bench` of a command shares."""
    from sglang_graft.bench.machine import machine, versions
    from sglang_graft.bench.units import Results

    shape, device = settings.shape, settings.device
    about = {"machine": machine(device), "versions": versions(device, commit or None)}
    about |= {"dtype": shape.dtype_name, "model": _model_text(shape)}
    return {
        "results": Results(out),
        "settings": settings,
        "work": work_dir.expanduser(),
        "about": about,
        "progress": Lines(Console()),
        "started": time.monotonic(),
    }


def _measure(lots: Sequence[Sequence[Plan]], bench: dict[str, Any]) -> None:
    """Every lot; says how many units are left."""
    from sglang_graft.bench.run import Bench

    left = sum(Bench(lot, **bench).run() for lot in lots)
    typer.echo(
        f"{left} units are left: run the same command again" if left else "all units are there"
    )


def _model_text(shape: ModelShape) -> str:
    """The model by its shape alone."""
    spec = shape.spec
    return (
        f"{spec.layers} layers, hidden {spec.linears[0].in_features}, "
        f"{shape.kv_heads} KV heads of {shape.head_dim}, vocabulary {shape.vocabulary}; "
        f"{shape.kv_bytes_per_token} B of KV a token, {shape.adapter_bytes_per_rank} B a rank"
    )


@app.command("report")
def report_command(
    results: Annotated[Path, typer.Argument(help="Folder of results.")],
    markdown: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for plots.")] = None,
) -> None:
    """Tables of all that was measured, against the best and the default static split."""
    from sglang_graft.bench.plots import draw
    from sglang_graft.bench.report import report

    with _errors("report"):
        drawn = draw(results, plots) if plots is not None else []
        text = report(results, [_beside(path, markdown) for path in drawn])
        if markdown is None:
            typer.echo(text)
        else:
            markdown.parent.mkdir(parents=True, exist_ok=True)
            markdown.write_text(text + "\n")
            typer.echo(f"wrote {markdown} and {len(drawn)} plots")


def _beside(path: Path, page: Path | None) -> str:
    """The path as a page at `page` links to it."""
    if page is None:
        return str(path)
    return os.path.relpath(path, page.parent)


@app.command("export")
def export_command(
    name: Annotated[str, typer.Argument(help="A workload of the protocol, or all.")],
    model: Annotated[Path, typer.Option(help="Folder of the base model, with its tokenizer.")],
    out: Annotated[Path, typer.Option(help="Folder for the files.")],
    rate: Annotated[float | None, typer.Option(min=0, help="First turns a second.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1)] = 60.0,
    adapters: Annotated[int | None, typer.Option(min=2)] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write workloads as files that `sglang.bench_serving` replays, and the commands to do so."""
    from sglang_graft.bench.export import export
    from sglang_graft.bench.units import Load
    from sglang_graft.cli.replay import workloads

    with _errors("export"):
        for workload in workloads(name):
            load = Load(name=workload, rate=rate, seconds=seconds, adapters=adapters, seed=seed)
            typer.echo(export(load, model, out))
