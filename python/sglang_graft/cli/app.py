"""The `graft` command."""

import json
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from sglang_graft import __version__
from sglang_graft.cli import adapters, bench, sync, tenants
from sglang_graft.cli.plan import plan_command
from sglang_graft.cli.top import top

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Graft: many LoRA adapters and their KV in one GPU memory pool, for SGLang.",
)
app.add_typer(adapters.app, name="adapters")
app.add_typer(bench.app, name="bench")
app.add_typer(tenants.app, name="tenants")
app.command()(sync.sync)
app.command("plan")(plan_command)
app.command()(top)


@app.callback()
def _root() -> None:
    """Keep subcommand names in use even while there are few of them."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check versions, devices and every hook; exit 1 with the remedy when something is off."""
    from sglang_graft.cli.doctor import examine, show

    report = examine()
    if as_json:
        typer.echo(report.model_dump_json())
    else:
        show(report, Console())
    raise typer.Exit(0 if report.healthy else 1)


@app.command()
def pool(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:30000",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    key: Annotated[str, typer.Option(help="The server's admin key, if it has one.")] = "",
) -> None:
    """Show what the pool of a running server holds."""
    from sglang_graft.cli.pool_table import show_pool

    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        response = httpx.get(f"{url.rstrip('/')}/graft/pool", timeout=30, headers=headers)
        response.raise_for_status()
    except httpx.HTTPError as error:
        typer.echo(f"{url}: {error}. Is a server with --enable-graft running there?", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(response.json()))
    else:
        show_pool(response.json(), Console())


@app.command()
def validate(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Adapter folders.")],
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of the base model; by default the one the adapter names."),
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a page, as the server's --page-size.")
    ] = None,
    max_lora_rank: Annotated[int, typer.Option(min=1, help="As the server's.")] = 256,
    dtype: Annotated[
        str | None, typer.Option(help="As the server's; by default the base model's own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what of each adapter would be applied where, or why not; exit 1 when one is refused.

    Nothing is fetched and no server is needed.
    """
    from sglang_graft.cli.validate import Options, show
    from sglang_graft.cli.validate import validate as check

    options = Options(model=model, page_tokens=page_size, max_rank=max_lora_rank, dtype=dtype)
    try:
        verdicts = [check(path, options) for path in paths]
    except ValueError as error:
        typer.echo(f"graft validate: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps({"adapters": [verdict.model_dump() for verdict in verdicts]}))
    else:
        show(verdicts, Console())
    raise typer.Exit(1 if any(verdict.refused for verdict in verdicts) else 0)


@app.command()
def replay(  # noqa: PLR0913 (typer: an option is a parameter)
    workload: Annotated[str, typer.Argument(help="A workload of the protocol, or all.")],
    policy: Annotated[str, typer.Option(help="cost, elora, lru, with commas; or all.")] = "all",
    budget_gb: Annotated[str, typer.Option(help="GPU memory for adapters and KV.")] = "6,12,24",
    host_gb: Annotated[float, typer.Option(min=0, help="Host memory for both; 0 is none.")] = 64,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    requests: Annotated[int, typer.Option(help="How many.")] = 3000,
    adapters: Annotated[int | None, typer.Option(help="By default the protocol's.")] = None,
    rate: Annotated[float | None, typer.Option(help="First turns in a second.")] = None,
    dependency_rule: Annotated[
        bool, typer.Option(help="KV leaves before its adapter (always so in the server).")
    ] = True,
    host_tier: Annotated[bool, typer.Option(help="--no-host-tier is --host-gb 0.")] = True,
    prefetch: Annotated[bool, typer.Option(help="Loads start when a request comes.")] = True,
    idle_promotion: Annotated[
        bool, typer.Option(help="Copies into free pages while nobody waits.")
    ] = False,
    optimum: Annotated[bool, typer.Option(help="Also the lower bound.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw cost over budget.")] = None,
) -> None:
    """Replay a seeded workload against the eviction policies, without a GPU or a server."""
    from sglang_graft.cli import replay as command
    from sglang_graft.sim.compare import Options, chosen_policies
    from sglang_graft.sim.workloads import Size

    options = Options(
        host_gb=host_gb if host_tier else 0.0,
        prefetch=prefetch,
        dependency_rule=dependency_rule,
        idle_promotion=idle_promotion,
        optimum=optimum,
    )
    try:
        found = command.rows(
            command.workloads(workload),
            chosen_policies(policy),
            command.budgets(budget_gb),
            seed=seed,
            size=Size(requests=requests, adapters=adapters, rate=rate),
            options=options,
        )
        with command.rare_collections():
            kept = command.echo(found) if as_json else command.show(found, Console())
        if plot is not None:
            command.plot(kept, plot)
    except ValueError as error:
        typer.echo(f"graft replay: {error}", err=True)
        raise typer.Exit(2) from None


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
