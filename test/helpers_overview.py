"""An answer of `/graft/overview`, made by hand."""

from typing import Any

from sglang_graft.tiers import SECONDS

COUNTERS = (
    "loads", "hits_device", "hits_host", "hits_disk", "tokens_device", "tokens_host",
    "tokens_computed",
)  # fmt: skip


def adapter(name: str | None, identity: str | None, **more: Any) -> dict[str, Any]:
    """One adapter node, on the device with 24 pages and KV of 6."""
    found = {
        "names": [] if name is None else [name],
        "identity": identity,
        "state": "device",
        "pages": 24 if identity else 0,
        "weight_pages": 24 if identity else 0,
        "kv_pages": 6,
        "host_kv_pages": 3,
        "locked": False,
        "pinned": False,
        "last_use": 40,
        "children": 0,
        "children_shown": [],
    }
    return found | more


def run(serial: int, **more: Any) -> dict[str, Any]:
    """A first KV node."""
    found = {
        "serial": serial,
        "pages": 6,
        "on_device": True,
        "on_host": False,
        "locked": False,
        "hits": 2,
        "last_use": 39,
        "children": 1,
    }
    return found | more


def departure(**more: Any) -> dict[str, Any]:
    """KV that left for a request."""
    found = {
        "clock": 38,
        "at": 1_700_000_000.0,
        "reason": "request",
        "name": "legal",
        "identity": "aaaaaaaaaaaaaaaa",
        "what": "kv",
        "pages": 12,
        "kept": True,
    }
    return found | more


def overview(count: int = 0) -> dict[str, Any]:
    """Two adapters and the base model in 200 pages; every counter stands at `count`."""
    shown = [
        adapter(None, None, children=1, children_shown=[run(9)], locked=True),
        adapter("legal", "aaaaaaaaaaaaaaaa", pinned=True, children=2, children_shown=[run(10)]),
        adapter("team/sales", "bbbbbbbbbbbbbbbb", state="loading", kv_pages=0),
    ]
    pages = {"total": 200, "adapter": 24, "kv_cached": 12, "kv_running": 4, "in_flight": 24}
    scheduler = {
        "pages": {**pages, "free": 136},
        "page_bytes": 2**20,
        "page_tokens": 16,
        "invalid_kv_pages": 0,
        "reserve_pages": 6,
        "protected_pages": 30,
        "adapters": {"device": 1, "loading": 1, "host": 0, "disk": 0},
        "adapters_known": 2,
        "host": dict.fromkeys(COUNTERS, count),
        "evictions": [{"reason": "request", "what": "kv", "nodes": count, "pages": count}],
        "clock": 41,
        "policy": "lru",
        "adapters_shown": shown,
        "departures": [departure(), departure(what="adapter", name=None, reason="unload")],
    }
    counts = [0] * (len(SECONDS) + 1)
    counts[6] = count
    http = {
        "requests": {"legal": count},
        "errors": [],
        "ttft": {"legal": {"bounds": list(SECONDS), "counts": counts, "sum": 0.08 * count}},
        "in_flight": 1,
        "stale": 0,
        "age": 0.0,
        "version": "0.1.0",
        "sglang_version": "0.5.17",
        "policy": "lru",
    }
    return {"model": "base", "scheduler": scheduler, "http": http}
