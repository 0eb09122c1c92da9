"""`graft tenants`: make a key, and check a tenants file without a server."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sglang_graft.tenants import Tenant, TenantsError, key_id, make_key, read

app = typer.Typer(no_args_is_help=True, help="Tenants of a server (--graft-tenants).")


@app.command()
def key(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make an API key. It is shown this once; the file gets its hash."""
    made, hashed = make_key()
    if as_json:
        typer.echo(json.dumps({"key": made, "hash": hashed}))
        return
    typer.echo(f"key   {made}")
    typer.echo(f"hash  {hashed}")
    typer.echo("Give the key to the tenant and put the hash under `keys:`.", err=True)


@app.command()
def check(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The tenants file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a tenants file allows, or exit 1 with what is wrong.

    Page floors are compared with the pool by a server only.
    """
    try:
        tenants = read(path)
    except TenantsError as error:
        typer.echo(f"graft tenants check: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        rows = {name: tenant.model_dump(mode="json") for name, tenant in tenants.items()}
        typer.echo(json.dumps({"tenants": rows}))
    else:
        _show(tenants, Console())


def _show(tenants: dict[str, Tenant], console: Console) -> None:
    table = Table("tenant", "keys", "adapters", "priority", "requests/s", "tokens/s", "pages")
    for name, tenant in tenants.items():
        names = [*tenant.adapters, *(["base model"] if tenant.base else [])]
        table.add_row(
            name,
            " ".join(map(key_id, tenant.keys)),
            ", ".join(names) or "none",
            str(tenant.priority),
            _number(tenant.requests_per_second),
            _number(tenant.tokens_per_second),
            f"{_pages(tenant.page_floor)} to {_pages(tenant.page_cap)}",
        )
    console.print(table)


def _number(value: float | None) -> str:
    return "any" if value is None else f"{value:g}"


def _pages(value: int | float | None) -> str:
    if value is None:
        return "any"
    return f"{value:.4g} of the pool" if isinstance(value, float) else str(value)
