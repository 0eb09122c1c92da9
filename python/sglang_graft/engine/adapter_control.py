"""Operations on single adapters that the HTTP process asks for: see `control`.

Each runs between two turns of the scheduler loop and only takes the next step of what takes time;
the HTTP process asks again. Adapters are named by their ids, so that an operation never meets the
successor of the adapter that it was meant for.
"""

from collections.abc import Iterable
from typing import Any

from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

from sglang_graft.cache import AdapterNode, Loss, State, forecast
from sglang_graft.cache.runs import below
from sglang_graft.engine import pinning
from sglang_graft.engine.prefix_cache import GraftPrefixCache
from sglang_graft.engine.waiting import reserved_pages
from sglang_graft.tiers import KnownAdapter, Step, look_ahead, to_device, to_host

Arguments = dict[str, Any]
Losses = dict[int, tuple[int, int]]
"""Serial of an adapter node -> pages of its weights and of its KV that leave the device."""


def adapters(scheduler: Any, _: Arguments) -> dict[str, Any]:
    """Every adapter that a name leads to, by id. O(adapters)."""
    cache: GraftPrefixCache = scheduler.tree_cache
    rows = {known.adapter_id: _row(cache, known) for known in cache.residency.known()}
    return {"adapters": rows, "page_bytes": cache.pool.layout.page_bytes}


def pin(scheduler: Any, arguments: Arguments) -> dict[str, Any]:
    """Keep an adapter on the device, or no longer (`pinned`). ValueError: no room for that."""
    cache: GraftPrefixCache = scheduler.tree_cache
    known, residency = _known(cache, arguments), cache.residency
    held = known.adapter_id in residency.pins.ids()
    before = _holdings(cache)
    if arguments["pinned"] and not held:
        node = known.node
        pinning.check_pages(scheduler, residency, known.name, node, node.weight_pages)
        if not residency.pin_adapter(known.adapter_id):
            raise ValueError(_no_room(cache, known))
    elif held and not arguments["pinned"]:
        residency.unpin_adapter(known.adapter_id)
    cache.check_now()
    return {"left": _left(cache, _lost(cache, before))}


def prioritize(scheduler: Any, arguments: Arguments) -> dict[str, Any]:
    """Set the `priority` of an adapter. O(nodes)."""
    cache: GraftPrefixCache = scheduler.tree_cache
    known = _known(cache, arguments)
    cache.residency.prioritize(known.adapter_id, arguments["priority"])
    cache.check_now()
    return {}


def warm(scheduler: Any, arguments: Arguments) -> dict[str, Any]:
    """The next step of an adapter towards `to` ("device" or "host"), and what that evicted.

    `failures` is what the first reply said (None then), so that only later failures count.
    """
    cache: GraftPrefixCache = scheduler.tree_cache
    known, tiers = _known(cache, arguments), cache.tiers
    failures = arguments["failures"]
    if failures is None:
        failures = tiers.images.failed
    _keep_promises(scheduler)
    before = _holdings(cache)
    go = {"device": to_device, "host": to_host}[arguments["to"]]
    step = go(tiers, known.node, failures)
    missing = 0
    if step is Step.NO_ROOM:
        missing = look_ahead(tiers, known.node.weight_pages).missing
    cache.check_now()
    return {
        "step": step.value,
        "failures": failures,
        "missing_bytes": missing * cache.pool.layout.page_bytes,
        "left": _left(cache, _lost(cache, before)),
    }


def foresee(scheduler: Any, arguments: Arguments) -> dict[str, Any]:
    """Whether weights would fit on the device now, and what would leave for them. No change.

    Of the adapter `id`, or of weights that were only read: `identity` and `pages`. With `pin` as a
    pin would take its room, else as "warm" does.
    """
    cache: GraftPrefixCache = scheduler.tree_cache
    tree, size = cache.tree, cache.pool.layout.page_bytes
    known = _known(cache, arguments) if arguments.get("id") is not None else None
    node = known.node if known is not None else tree.adapter(arguments["identity"])
    pages = node.weight_pages if node is not None else int(arguments["pages"])
    name = arguments["name"]
    answer = {"bytes": pages * size, "missing_bytes": 0, "leaves": [], "reason": None}
    try:
        if node is None:
            cache.residency.check_size(name, arguments["identity"], pages)
        if arguments["pin"]:
            but = (None if known is None else known.adapter_id,)
            cache.residency.check_pin(name, node, pages, but)
            pinning.check_pages(scheduler, cache.residency, name, node, pages)
    except ValueError as error:
        return {**answer, "fits": False, "reason": str(error)}
    if node is not None and node.state is not State.ABSENT:
        return {**answer, "fits": True}
    _keep_promises(scheduler)
    found = forecast(tree, pages) if arguments["pin"] else look_ahead(cache.tiers, pages)
    return {
        **answer,
        "fits": not found.missing,
        "missing_bytes": found.missing * size,
        "leaves": _left(cache, _by_adapter(found.losses)),
        "reason": _WHY if found.missing else None,
    }


def release(scheduler: Any, arguments: Arguments) -> dict[str, Any]:
    """What an unload would free at once, and with the adapter's last request. O(its KV)."""
    cache: GraftPrefixCache = scheduler.tree_cache
    known, residency = _known(cache, arguments), cache.residency
    node, now, later = known.node, 0, 0
    if not any(other.node is node for other in residency.known() if other is not known):
        requests = node.lock - residency.pins.count(node)
        now, later = (0, len(node.pages)) if requests else (len(node.pages), 0)
        for kv in below(node):
            now, later = (now, later + len(kv.pages)) if kv.lock else (now + len(kv.pages), later)
    size = cache.pool.layout.page_bytes
    return {"freed_bytes": now * size, "following_bytes": later * size}


def unload(scheduler: Any, arguments: Arguments) -> dict[str, Any]:
    """Retire an adapter; the second time, when its last request has ended, forget it."""
    ref = UnloadLoRAAdapterReqInput(lora_name=arguments["name"], lora_id=arguments["id"])
    result = scheduler.unload_lora_adapter(ref)
    if not result.success:
        raise ValueError(result.error_message)
    return {"freed": result.error_message}


OPERATIONS = {
    "adapters": adapters,
    "pin_adapter": pin,
    "prioritize_adapter": prioritize,
    "warm_adapter": warm,
    "foresee_adapter": foresee,
    "release_adapter": release,
    "unload_adapter": unload,
}

_WHY = "running requests, pins and what is promised to them hold the rest of the pool"


def _known(cache: GraftPrefixCache, arguments: Arguments) -> KnownAdapter:
    for known in cache.residency.known():
        if known.adapter_id == arguments["id"]:
            return known
    raise ValueError(f"adapter {arguments['name']} was unloaded or replaced meanwhile")


def _row(cache: GraftPrefixCache, known: KnownAdapter) -> dict[str, Any]:
    node, size = known.node, cache.pool.layout.page_bytes
    absent = "disk" if node.host is None else "host"
    pins = cache.residency.pins
    return {
        "identity": node.identity,
        "state": {State.LOADING: "loading", State.RESIDENT: "device"}.get(node.state, absent),
        "bytes": node.weight_pages * size,
        "device_bytes": len(node.pages) * size,
        "host_bytes": len(node.host.pages) * size if node.host else 0,
        "kv_bytes": node.kv_pages * size,
        "host_kv_bytes": node.host_kv_pages * size,
        "hits": known.hits,
        "loads": node.loads,
        "evictions": node.evictions,
        "pinned": known.adapter_id in pins.ids(),
        "priority": known.priority,
    }


def _no_room(cache: GraftPrefixCache, known: KnownAdapter) -> str:
    tree = cache.tree
    return (
        f"adapter {known.name}: no room to pin {known.node.weight_pages} pages now,"
        f" {tree.ledger.free + tree.evictable} are free or evictable and running requests hold the"
        " others; try again later"
    )


def _keep_promises(scheduler: Any) -> None:
    """Bring the reserve up to what runs now; the last scheduling pass set it before it admitted."""
    running, last = scheduler.running_batch, scheduler.last_batch
    pages = reserved_pages(scheduler, running)
    if last is not None and last is not running:
        admitted = {req.rid for req in last.reqs} - {req.rid for req in running.reqs}
        pages += len(admitted)
    scheduler.tree_cache.pool.ledger.reserve = pages


def _holdings(cache: GraftPrefixCache) -> dict[int, tuple[int, int]]:
    return {node.serial: (len(node.pages), node.kv_pages) for node in cache.tree.adapters()}


def _lost(cache: GraftPrefixCache, before: dict[int, tuple[int, int]]) -> Losses:
    now = _holdings(cache)
    return {
        serial: (max(0, weights - now[serial][0]), max(0, kv - now[serial][1]))
        for serial, (weights, kv) in before.items()
    }


def _by_adapter(losses: Iterable[Loss]) -> Losses:
    found: Losses = {}
    for node, pages in losses:
        weights, kv = found.get(node.adapter.serial, (0, 0))
        own = isinstance(node, AdapterNode)
        found[node.adapter.serial] = (weights + pages * own, kv + pages * (not own))
    return found


def _left(cache: GraftPrefixCache, lost: Losses) -> list[dict[str, Any]]:
    """One row for each adapter that loses something, in the order of their creation.

    What the last requests of a forgotten adapter leave behind is nobody's.
    """
    size, residency = cache.pool.layout.page_bytes, cache.residency
    names: dict[int, list[str]] = {cache.tree.base.serial: ["(base model)"]}
    for known in (*residency.known(), *residency.retired()):
        names.setdefault(known.node.serial, []).append(known.name)
    return [
        {"adapters": names[serial], "bytes": weights * size, "kv_bytes": kv * size}
        for serial, (weights, kv) in sorted(lost.items())
        if serial in names and (weights or kv)
    ]
