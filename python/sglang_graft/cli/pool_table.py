"""The pool report as tables for a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

_PAGES = ("total", "free", "adapter", "kv_cached", "kv_running", "in_flight")
_COLUMNS = ("name", "state", "pages", "kv_pages", "locks", "hits", "loads", "evictions")


def show_pool(report: dict[str, Any], console: Console) -> None:
    """Print pages by owner, and one row for each adapter."""
    mib = report["page_bytes"] / 2**20
    pages = Table(title=f"pool: pages of {mib:.2f} MiB, {report['page_tokens']} tokens each")
    for name in (*_PAGES, "invalid_kv"):
        pages.add_column(name, justify="right")
    counts = [str(report["pages"][name]) for name in _PAGES]
    pages.add_row(*counts, str(report["invalid_kv_pages"]))
    console.print(pages)
    adapters = Table(title="adapters")
    for name in _COLUMNS:
        words = name in ("name", "state")
        adapters.add_column(name, justify="left" if words else "right", no_wrap=words)
    base = {"name": "(base model)", "hits": "", **report["base"]}
    for row in (base, *report["adapters"]):
        adapters.add_row(*(str(row[name]) for name in _COLUMNS))
    console.print(adapters)
