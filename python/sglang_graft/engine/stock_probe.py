"""What a server without Graft holds, for comparisons: KV whose adapter is in no slot, and loads.

Only with GRAFT_STOCK_PROBE=1 and without `--enable-graft`; it reads and counts, and changes no
decision. Targets (0.5.17): AFTER `Scheduler.get_internal_state`, whose answer `/server_info` shows,
and AFTER `LoRAMemoryPool.load_lora_weight_to_buffer`. Reason: stock reports neither.
"""

import time
from collections import Counter
from typing import Any

from sglang_graft.engine.hooks import Hook

KEY = "graft_stock_probe"
_ID_LENGTH = 32
_loads: Counter[str] = Counter()


def count_load(result: None, self: Any, uid: str | None, *_: Any, **__: Any) -> None:
    """AFTER `load_lora_weight_to_buffer`: one more copy into a slot; None is the empty adapter."""
    if uid is not None:
        _loads[uid] += 1


def kv_tokens(tree: Any) -> Counter[str | None]:
    """Tokens of cached KV by the id of their adapter (None: the base model), by a walk.

    SGLang appends the adapter's id, 32 hex digits, to the extra key of a request.
    """
    found: Counter[str | None] = Counter()
    open_nodes = list(tree.root_node.children.values())
    while open_nodes:
        node = open_nodes.pop()
        open_nodes.extend(node.children.values())
        if node.value is not None:
            extra = node.key.extra_key
            found[extra[-_ID_LENGTH:] if extra else None] += len(node.value)
    return found


def probe(scheduler: Any) -> dict[str, Any]:
    """Tokens of KV in all, free, cached and invalid; slots; loads by adapter name."""
    start = time.perf_counter()
    cached = kv_tokens(scheduler.tree_cache)
    manager = getattr(scheduler.tp_worker.model_runner, "lora_manager", None)
    pool = None if manager is None else manager.memory_pool
    resident = {None} if pool is None else {None, *pool.uid_to_buffer_id}
    refs = {} if manager is None else manager.lora_refs
    held = sum(1 for uid in resident if uid is not None)
    return {
        "tokens_total": scheduler.max_total_num_tokens,
        "tokens_free": int(scheduler.token_to_kv_pool_allocator.available_size()),
        "tokens_cached": sum(cached.values()),
        "tokens_invalid": sum(n for uid, n in cached.items() if uid not in resident),
        "slots_total": 0 if pool is None else pool.max_loras_per_batch,
        "slots_used": held,
        "loads": {refs[uid].lora_name: count for uid, count in _loads.items() if uid in refs},
        # Nothing is unloaded in a comparison: what was loaded and is not there was evicted.
        "evictions": sum(_loads.values()) - held,
        "seconds": time.perf_counter() - start,
    }


def add_probe(result: Any, self: Any, recv_req: Any) -> None:
    """AFTER `get_internal_state`: add the probe to what `/server_info` shows."""
    result.internal_state[KEY] = probe(self)


HOOKS = (
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        kind="after",
        function=add_probe,
        parameters=("self", "recv_req"),
        reason="invalid KV of a server without Graft",
    ),
    Hook(
        target="sglang.srt.lora.mem_pool.LoRAMemoryPool.load_lora_weight_to_buffer",
        kind="after",
        function=count_load,
        parameters=(
            "self",
            "uid",
            "buffer_id",
            "lora_adapter",
            "lora_modules",
            "lora_embed_tokens_module",
            "lora_lm_head_module",
        ),
        reason="adapter loads of a server without Graft",
    ),
)
