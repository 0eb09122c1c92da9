"""The KV pool that SGLang sees: views into the arena instead of a tensor for each layer.

Target (0.5.17): `KVCacheConfigurator._build_token_to_kv_pool`, the one place that chooses a pool
class on CUDA and on out-of-tree platforms alike. Reason: K, V and adapter weights share one
allocation, indexed by dense ids.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from sglang_graft import config
from sglang_graft.cache import Prices, UnifiedTree, make_policy
from sglang_graft.engine.hooks import Hook
from sglang_graft.engine.host_memory import early, make_host_pool
from sglang_graft.engine.pool import Pool, set_pool
from sglang_graft.pool import Arena, PageLayout, PageLedger


class ArenaKVPool(MHATokenToKVPool):
    """SGLang's MHA pool whose per-layer buffers are views of an arena.

    `size` is the largest dense id that is not in the sink, as SGLang's bound checks expect
    (`size + page_size` rows a layer); how many tokens fit is the allocator's number.
    """

    def __init__(self, arena: Arena, **kwargs: Any) -> None:
        self.arena = arena
        layout = arena.layout
        super().__init__(
            layout.rows(arena.pages) - layout.page_tokens,
            page_size=layout.page_tokens,
            head_num=layout.kv_heads,
            head_dim=layout.head_dim,
            layer_num=layout.layers,
            enable_kv_cache_copy=False,
            **kwargs,
        )

    def _create_buffers_normal(self) -> None:
        layers = range(self.layer_num)
        self.k_buffer = [self.arena.key_view(layer) for layer in layers]
        self.v_buffer = [self.arena.value_view(layer) for layer in layers]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """K bytes and V bytes; the views overlap, so their sizes would count pages many times."""
        half = self.arena.buffer.numel() // 2
        return half, half


def _check_model(configurator: Any) -> None:
    """Refuse models whose KV is not plain multi-head with equal K and V rows."""
    model = configurator.model_config
    kinds = {
        "multi-head latent attention": configurator.use_mla_backend,
        "sliding-window layers with their own pool": configurator.is_hybrid_swa,
        "Mamba layers": configurator.mambaish_config is not None,
        "K and V heads of different size": model.head_dim != model.v_head_dim,
    }
    for kind, present in kinds.items():
        if present:
            raise ValueError(
                f"--enable-graft: {model.model_path} has {kind}; wanted a model with plain"
                " multi-head or grouped-query attention. Start it without --enable-graft."
            )


def build_kv_pool(
    original: Callable[..., Any],
    self: Any,
    *,
    sizes: Any,
    is_dsa_model: bool,
    is_dsv4_model: bool,
    req_to_token_pool: Any,
) -> ArenaKVPool:
    """AROUND `_build_token_to_kv_pool`: arena, ledger, host pool and tree, then the KV views."""
    _check_model(self)
    dtype = self.kv_cache_dtype
    fp8 = dtype in (torch.float8_e5m2, torch.float8_e4m3fn)
    layout = PageLayout(
        layers=self.layer_info.num_effective_layers,
        page_tokens=self.pool_page_size,
        kv_heads=self.model_config.get_num_kv_heads(get_parallel().attn_tp_size),
        head_dim=self.model_config.head_dim,
        # SGLang stores fp8 as bytes, because index_put lacks fp8.
        dtype=torch.uint8 if fp8 else dtype,
    )
    pages = sizes.max_total_num_tokens // layout.page_tokens + 1
    arena = Arena(layout, pages, self.device)
    ledger = PageLedger(pages)
    options = config.published()
    assert options is not None, "the KV pool hook runs, but no options were published"
    host = make_host_pool(arena, options.host_memory_gb, early())
    prices = Prices(
        page_bytes=layout.page_bytes,
        page_tokens=layout.page_tokens,
        host_tier=True,
        host_kv=not options.no_host_kv,
    )
    tree = UnifiedTree(
        ledger,
        page_tokens=layout.page_tokens,
        policy=make_policy(options.policy, prices),
        host=host.ledger,
    )
    set_pool(Pool(layout=layout, arena=arena, ledger=ledger, tree=tree, host=host, prices=prices))
    return ArenaKVPool(
        arena,
        dtype=dtype,
        device=self.device,
        enable_memory_saver=False,
        start_layer=self.layer_info.start_layer,
        end_layer=self.layer_info.end_layer,
    )


HOOKS = (
    Hook(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
        "._build_token_to_kv_pool",
        kind="around",
        function=build_kv_pool,
        parameters=("self", "sizes", "is_dsa_model", "is_dsv4_model", "req_to_token_pool"),
        reason="KV views into the arena",
    ),
)
