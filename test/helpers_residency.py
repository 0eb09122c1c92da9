"""A small pool of real parts with tiers whose copies are immediate."""

from pathlib import Path

import torch

from sglang_graft.adapters import ModelSpec, PointerTable, TileMap
from sglang_graft.cache import HostTier, Lru, State, UnifiedTree
from sglang_graft.pool import Arena, PageLayout, PageLedger
from sglang_graft.tiers import (
    CpuCopier,
    HostPool,
    Packed,
    Residency,
    TierOptions,
    Tiers,
    build_tiers,
)

SPEC = ModelSpec.llama_like(
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    },
    torch.float32,
)
HOST_PAGES = 200
LAYOUT = PageLayout(layers=2, page_tokens=16, kv_heads=2, head_dim=16, dtype=torch.float32)


def make(pages: int = 40, slots: int = 3, options: TierOptions | None = None) -> Residency:
    ledger = PageLedger(pages)
    tree = UnifiedTree(ledger, page_tokens=LAYOUT.page_tokens, policy=Lru())
    tile_map = TileMap(SPEC, LAYOUT.page_bytes)
    table = PointerTable(slots, tile_map, "cpu")
    arena = Arena(LAYOUT, pages, "cpu")
    residency = Residency(tree=tree, arena=arena, tile_map=tile_map, table=table)
    host = HostPool(HOST_PAGES, LAYOUT.page_bytes, pin=False)
    tree.host = HostTier(host.ledger, tree.policy)
    build_tiers(residency, host, CpuCopier(arena, host), unreadable, options=options)
    return residency


def tiers_of(residency: Residency) -> Tiers:
    """The tiers that `make` built."""
    tiers = residency.offer.__self__  # type: ignore[attr-defined]
    assert isinstance(tiers, Tiers)
    return tiers


def unreadable(path: Path) -> Packed:
    raise FileNotFoundError(f"{path} is no folder in these tests")


def promote(residency: Residency, adapter_id: str) -> bool:
    """Bring an adapter's bytes to the device, as the tiers do."""
    node = residency.node(adapter_id)
    assert node is not None
    tiers = tiers_of(residency)
    tiers.images.store.wait()
    if node.state is State.ABSENT:
        if residency.tree.load(node) is None:
            return False
        tiers.transfers.load(node)
    tiers.step([])  # for pinned ones, whose pages wait for their bytes
    tiers.transfers.poll()
    return node.state is State.RESIDENT
