"""What the pool holds, and what adapters are checked against, as plain numbers."""

from dataclasses import asdict
from typing import Any

from sglang_graft.cache import AdapterNode, State
from sglang_graft.engine.prefix_cache import GraftPrefixCache
from sglang_graft.pool import Owner
from sglang_graft.tiers import KnownAdapter

KEY = "graft"
MODEL_KEY = "graft_model"
_WHERE = {State.LOADING: "loading", State.RESIDENT: "device"}


def where(node: AdapterNode) -> str:
    """Where the weights are: `device`, `loading`, `host` or `disk`."""
    return _WHERE.get(node.state, "disk" if node.host is None else "host")


def pages_by_owner(cache: GraftPrefixCache) -> dict[str, int]:
    """Device pages: `total`, and who has them."""
    ledger = cache.pool.ledger
    return {
        "total": ledger.total,
        "free": ledger.free,
        "adapter": ledger.count(Owner.ADAPTER),
        "kv_cached": ledger.count(Owner.KV_CACHED),
        "kv_running": ledger.count(Owner.KV_RUNNING),
        "in_flight": ledger.count(Owner.IN_FLIGHT),
    }


def _node_report(node: AdapterNode) -> dict[str, Any]:
    return {
        "identity": node.identity,
        "state": where(node),
        "pages": len(node.pages),
        "kv_pages": node.kv_pages,
        "locks": node.lock,
        "loads": node.loads,
        "evictions": node.evictions,
    }


def _adapter_report(cache: GraftPrefixCache, known: KnownAdapter) -> dict[str, Any]:
    pins = cache.residency.pins
    return {
        "name": known.name,
        "weight_pages": known.node.weight_pages,
        "hits": known.hits,
        "pinned": known.adapter_id in pins.ids(),
        **cache.tiers.adapter_report(known.node),
        **_node_report(known.node),
        "locks": known.node.lock - pins.count(known.node),
    }


def pool_report(cache: GraftPrefixCache) -> dict[str, Any]:
    """Pages by owner, every adapter that has a name, and those that wait for their last request.

    `locks` counts requests. Costs O(adapters).
    """
    residency = cache.residency
    return {
        "pages": pages_by_owner(cache),
        "page_bytes": cache.pool.layout.page_bytes,
        "page_tokens": cache.pool.layout.page_tokens,
        "invalid_kv_pages": cache.tree.invalid_kv_pages(),
        "adapter_bytes_loaded": cache.tiers.transfers.adapter_pages_loaded
        * cache.pool.layout.page_bytes,
        "adapter_host_bytes": residency.host_bytes(),
        "policy": cache.tree.policy.name,
        "host": cache.tiers.report(),
        "base": {
            **cache.tiers.adapter_report(cache.tree.base),
            **_node_report(cache.tree.base),
        },
        "adapters": [_adapter_report(cache, known) for known in residency.known()],
        "retired": [_adapter_report(cache, known) for known in residency.retired()],
    }


def model_report(cache: GraftPrefixCache) -> dict[str, Any]:
    """What adapters are checked against: the base model's linears, and the limits."""
    tile_map, ledger = cache.residency.tile_map, cache.pool.ledger
    spec = asdict(tile_map.spec)
    return {
        **spec,
        "dtype": str(spec["dtype"]).removeprefix("torch."),
        "max_rank": tile_map.max_rank,
        "pool_bytes": ledger.total * cache.pool.layout.page_bytes,
    }


def reports(cache: GraftPrefixCache) -> dict[str, Any]:
    """Both reports under their keys."""
    return {KEY: pool_report(cache), MODEL_KEY: model_report(cache)}
