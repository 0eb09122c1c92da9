"""Put the tiers of one pool together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_graft.cache import Prices, UnifiedTree
from sglang_graft.tiers.copies import Copier
from sglang_graft.tiers.counters import Counters
from sglang_graft.tiers.host_pool import HostPool
from sglang_graft.tiers.idle import IdlePromotion
from sglang_graft.tiers.images import Images
from sglang_graft.tiers.prefetch import LOOKAHEAD, Prefetch
from sglang_graft.tiers.rates import MeasuredRates
from sglang_graft.tiers.residency import Residency
from sglang_graft.tiers.store import AdapterStore, Packed
from sglang_graft.tiers.tiers import Tiers
from sglang_graft.tiers.transfers import Transfers
from sglang_graft.tiers.write_back import WriteBack

AHEAD = 16
"""The pool's size over the pages whose copies are made before they have to leave."""
LEAST_AHEAD = 64
MOST_UNDER_WAY = 512
"""Pages on their way to the host at a time: as many as a forward of 8192 tokens fills."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What can be switched off, or on."""

    host_kv: bool = True
    prefetch: bool = True
    idle_promotion: bool = False


def build_tiers(
    residency: Residency,
    host: HostPool,
    copier: Copier,
    read: Callable[[Path], Packed],
    *,
    options: TierOptions | None = None,
    prices: Prices | None = None,
) -> Tiers:
    """Tiers over the tree of `residency`, whose host ledger is that of `host`.

    `read` runs in threads. Without prefetch only the first request in the queue has loads begun.
    `prices` are those of the tree's policy; what is measured here goes into them.
    """
    tree = residency.tree
    options = options or TierOptions()
    assert tree.host is not None, "the tree has no host tier"
    assert tree.host.ledger is host.ledger, "the tree has another host pool"
    counters = Counters()
    rates = MeasuredRates(tree, prices or Prices(host.page_bytes, tree.page_tokens))
    page_bytes = host.page_bytes
    transfers = Transfers(
        tree, copier, on_loaded=lambda pages, s: rates.meter.h2d(pages * page_bytes, s)
    )
    store = AdapterStore(read, host.write, on_read=rates.meter.disk)
    images = Images(tree, store, counters, residency.sources)
    prefetch = Prefetch(
        tree=tree,
        transfers=transfers,
        images=images,
        counters=counters,
        rates=rates.meter,
        page_bytes=page_bytes,
        paths=residency.source,
        lookahead=LOOKAHEAD if options.prefetch else 1,
        host_kv=options.host_kv,
    )
    tiers = Tiers(
        tree=tree,
        transfers=transfers,
        images=images,
        prefetch=prefetch,
        counters=counters,
        rates=rates,
        page_bytes=page_bytes,
        write_back=write_back(tree, transfers, counters) if options.host_kv else None,
        idle=IdlePromotion(tree, transfers, counters) if options.idle_promotion else None,
        pinned=residency.pins.nodes,
    )
    residency.offer, residency.forget = tiers.offer, tiers.forget
    return tiers


def write_back(tree: UnifiedTree, transfers: Transfers, counters: Counters) -> WriteBack:
    """Copies ahead of eviction, as far as suits the size of the pool."""
    ahead = max(LEAST_AHEAD, tree.ledger.total // AHEAD)
    return WriteBack(tree, transfers, counters, ahead, under_way=min(ahead, MOST_UNDER_WAY))
