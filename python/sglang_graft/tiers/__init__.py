"""What moves between device, host and disk, and when."""

from sglang_graft.tiers.build import TierOptions, build_tiers
from sglang_graft.tiers.copies import Copier, CpuCopier, CudaCopier, Ticket, Way
from sglang_graft.tiers.counters import Counters, TierCounts
from sglang_graft.tiers.histogram import SECONDS, Histogram
from sglang_graft.tiers.host_pool import HostPool
from sglang_graft.tiers.idle import IdlePromotion
from sglang_graft.tiers.images import AdapterChangedError, Images
from sglang_graft.tiers.prefetch import Prefetch
from sglang_graft.tiers.rates import MeasuredRates, Rates
from sglang_graft.tiers.read_ahead import ReadAhead
from sglang_graft.tiers.reserve import Reserve
from sglang_graft.tiers.residency import KnownAdapter, Residency
from sglang_graft.tiers.store import AdapterStore, Packed
from sglang_graft.tiers.tiers import Tiers
from sglang_graft.tiers.transfers import Transfers
from sglang_graft.tiers.warm import Step, look_ahead, to_device, to_host
from sglang_graft.tiers.wish import Need, Wish
from sglang_graft.tiers.write_back import WriteBack

__all__ = [
    "SECONDS",
    "AdapterChangedError",
    "AdapterStore",
    "Copier",
    "Counters",
    "CpuCopier",
    "CudaCopier",
    "Histogram",
    "HostPool",
    "IdlePromotion",
    "Images",
    "KnownAdapter",
    "MeasuredRates",
    "Need",
    "Packed",
    "Prefetch",
    "Rates",
    "ReadAhead",
    "Reserve",
    "Residency",
    "Step",
    "Ticket",
    "TierCounts",
    "TierOptions",
    "Tiers",
    "Transfers",
    "Way",
    "Wish",
    "WriteBack",
    "build_tiers",
    "look_ahead",
    "to_device",
    "to_host",
]
