"""All hooks of a scheduler process, and the factory that proves them live before serving.

SGLang builds the tree cache last. So the factory is where Graft refuses to start when any hook is
missing; and when this module was never loaded, SGLang itself refuses the unknown backend name.
"""

import logging
from typing import Any

from sglang_graft import config
from sglang_graft.engine import (
    admission,
    allocator,
    background_load,
    bind,
    control,
    first_tokens,
    flush,
    graphs,
    host_memory,
    kv_pool,
    lora_backend,
    lora_manager,
    page_table,
    prefill_times,
    prefix_cache,
    single_tokens,
    start,
    tenants,
    turns,
    waiting,
)
from sglang_graft.engine.hooks import register, verify
from sglang_graft.engine.pool import get_pool

logger = logging.getLogger(__name__)

HOOKS = (
    *host_memory.HOOKS,
    *kv_pool.HOOKS,
    *allocator.HOOKS,
    *lora_manager.HOOKS,
    *bind.HOOKS,
    *start.HOOKS,
    *graphs.HOOKS,
    *page_table.HOOKS,
    *single_tokens.HOOKS,
    *background_load.HOOKS,
    *admission.HOOKS,
    *turns.HOOKS,
    *tenants.HOOKS,
    *waiting.HOOKS,
    *control.HOOKS,
    *flush.HOOKS,
    *prefill_times.HOOKS,
    *first_tokens.HOOKS,
)


def make_prefix_cache(ctx: Any) -> prefix_cache.GraftPrefixCache:
    """Build the tree cache from a TreeCacheBuildContext, after every hook is proved live."""
    verify(HOOKS)
    options = config.published()
    assert options is not None, "the tree is built, but no options were published"
    pool = get_pool()
    manager = ctx.tp_worker.model_runner.lora_manager
    residency = manager.residency
    assert manager.at_start.is_finished, "adapters named at start are not all registered"
    logger.info(
        "Graft is on: %d pages of %d bytes (%d tokens each), %d more in host memory, %d adapters,"
        " %s, %d hooks live",
        pool.ledger.total,
        pool.layout.page_bytes,
        pool.layout.page_tokens,
        pool.host.ledger.total,
        len(residency.known()),
        options,
        len(HOOKS),
    )
    prefill_times.measure_into(manager.tiers.rates.meter)
    cache = prefix_cache.GraftPrefixCache(
        pool,
        residency,
        manager.tiers,
        ctx.params,
        keep=not ctx.disable_radix_cache,
        check=options.check,
        with_tenants=bool(options.tenants),
    )
    if options.tenants:
        tenants.set_from_file(cache, options.tenants)
    return cache


def install() -> None:
    """Register hooks and backends; SGLang's `load_plugins` applies the hooks right afterwards."""
    lora_backend.register()
    prefix_cache.register(make_prefix_cache)
    register(HOOKS)
