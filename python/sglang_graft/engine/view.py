"""What `/metrics` and the page ask of the scheduler: numbers, and a picture.

Both are bounded: `metrics` costs a look at each adapter and sends no names, `overview` sends the
adapters used last, the first KV below them, and the latest departures. Neither shows any token.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

from sglang_graft.cache import AdapterNode, Node
from sglang_graft.engine import report
from sglang_graft.engine.prefix_cache import GraftPrefixCache

MOST_ADAPTERS = 200
MOST_CHILDREN = 16
LOOKED_AT = 1024
"""First KV nodes of an adapter among which the last used are found: the newest so many."""
WHERE = ("device", "loading", "host", "disk")


def metrics(cache: GraftPrefixCache) -> dict[str, Any]:
    """Everything that `serving/metrics_table` reads. O(adapters)."""
    nodes = {known.node.serial: known.node for known in cache.residency.known()}
    states = Counter(report.where(node) for node in nodes.values())
    return {
        "pages": report.pages_by_owner(cache),
        "page_bytes": cache.pool.layout.page_bytes,
        "page_tokens": cache.pool.layout.page_tokens,
        "invalid_kv_pages": cache.tree.invalid_kv_pages(),
        "protected_pages": cache.tree.protected,
        "reserve_pages": cache.pool.ledger.reserve,
        "names": len(cache.residency.known()),
        "retired": len(cache.residency.retired()),
        "pinned": len(cache.residency.pins.nodes()),
        "adapters": {where: states[where] for where in WHERE},
        "host": cache.tiers.report(),
        "evictions": [
            {"reason": reason.value, "what": _what(weights), "nodes": nodes, "pages": pages}
            for (reason, weights), (nodes, pages) in cache.tree.departures.counts.items()
        ],
        "load_seconds": cache.tiers.transfers.load_seconds.report(),
        **cache.observed.report(),
    }


def overview(cache: GraftPrefixCache, arguments: dict[str, Any]) -> dict[str, Any]:
    """The pool as a picture.

    `adapters`, `children`: at most so many of each (200, 16). ValueError for other bounds.
    """
    most = _bound(arguments, "adapters", MOST_ADAPTERS)
    children = _bound(arguments, "children", MOST_CHILDREN)
    names: dict[int, list[str]] = {}
    for known in cache.residency.known():
        names.setdefault(known.node.serial, []).append(known.name)
    pinned = {node.serial for node in cache.residency.pins.nodes()}
    nodes = sorted(cache.tree.adapters(), key=lambda node: (-node.last_use, node.serial))
    shown = nodes[:most]
    if cache.tree.base not in shown:
        shown[-1:] = [cache.tree.base]
    return {
        **metrics(cache),
        "policy": cache.tree.policy.name,
        "clock": cache.tree.clock,
        "most_children": children,
        "adapters_known": len(nodes) - 1,
        "adapters_shown": [
            _adapter(node, names.get(node.serial, []), pinned, children) for node in shown
        ],
        "departures": _departures(cache),
    }


def _bound(arguments: dict[str, Any], name: str, most: int) -> int:
    wanted = arguments.get(name, most)
    if not isinstance(wanted, int) or not 1 <= wanted <= most:
        raise ValueError(f"{name}: wanted 1 to {most}, got {wanted!r}")
    return wanted


def _what(weights: bool) -> str:
    return "adapter" if weights else "kv"


def _adapter(
    node: AdapterNode, names: list[str], pinned: set[int], children: int
) -> dict[str, Any]:
    newest = islice(reversed(node.children.values()), LOOKED_AT)
    below = heapq.nsmallest(children, newest, key=lambda child: (-child.last_use, child.serial))
    return {
        "names": names,
        "identity": node.identity,
        "state": report.where(node),
        "pages": len(node.pages),
        "weight_pages": node.weight_pages,
        "kv_pages": node.kv_pages,
        "host_kv_pages": node.host_kv_pages,
        "locked": node.lock > 0,
        "pinned": node.serial in pinned,
        "last_use": node.last_use,
        "children": len(node.children),
        "children_shown": [_run(child) for child in below],
    }


def _run(node: Node) -> dict[str, Any]:
    """A first KV node: `pages` are its own, wherever they are; its children are only counted."""
    return {
        "serial": node.serial,
        "pages": len(node.pages) or len(node.host.pages if node.host else ()),
        "on_device": bool(node.pages),
        "on_host": node.host is not None,
        "locked": node.lock > 0,
        "hits": node.hits,
        "last_use": node.last_use,
        "children": len(node.children),
    }


def _departures(cache: GraftPrefixCache) -> list[dict[str, Any]]:
    """The latest first. An adapter that was unloaded has its identity for a name."""
    names = {
        known.node.identity: known.name
        for known in (*cache.residency.retired(), *cache.residency.known())
    }
    return [
        {
            "clock": one.clock,
            "at": one.at,
            "reason": one.reason.value,
            "name": names.get(one.identity) if one.identity else None,
            "identity": one.identity,
            "what": _what(one.weights),
            "pages": one.pages,
            "kept": one.kept,
        }
        for one in reversed(cache.tree.departures.latest())
    ]


def _answer_metrics(scheduler: Any, _: dict[str, Any]) -> dict[str, Any]:
    cache: GraftPrefixCache = scheduler.tree_cache
    return cache.observed.answer(lambda: metrics(cache))


def _answer_overview(scheduler: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    cache: GraftPrefixCache = scheduler.tree_cache
    return cache.observed.answer(lambda: overview(cache, arguments))


OPERATIONS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "metrics": _answer_metrics,
    "overview": _answer_overview,
}
