"""The tiers of this process: which streams they copy on, and how they read adapters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_graft import config
from sglang_graft.engine.pool import Pool
from sglang_graft.tiers import (
    Copier,
    CpuCopier,
    CudaCopier,
    Packed,
    Residency,
    TierOptions,
    Tiers,
    build_tiers,
)

_forward: list[Any] = []


def note_forward_stream(scheduler: Any) -> None:
    """Remember on which stream this scheduler launches forwards; a no-op on the CPU.

    Without overlap scheduling that is the stream of the scheduler's own loop.
    """
    if not _forward and str(scheduler.device).startswith("cuda") and torch.cuda.is_available():
        overlap = scheduler.enable_overlap
        _forward.append(scheduler.forward_stream if overlap else torch.cuda.current_stream())


def _forward_stream() -> Any:
    # Before the first pass over the queue, all that runs is the start itself, on its own stream.
    return _forward[0] if _forward else torch.cuda.current_stream()


def make_tiers(pool: Pool, residency: Residency, read: Callable[[Path], Packed]) -> Tiers:
    """Tiers of `pool` as the published options ask for."""
    options = config.published()
    assert options is not None, "the tiers are built, but no options were published"
    copier: Copier
    if pool.arena.buffer.device.type == "cuda":
        copier = CudaCopier(pool.arena, pool.host, _forward_stream)
    else:
        copier = CpuCopier(pool.arena, pool.host)
    chosen = TierOptions(
        host_kv=not options.no_host_kv,
        prefetch=not options.no_prefetch,
        idle_promotion=options.idle_promotion,
    )
    return build_tiers(residency, pool.host, copier, read, options=chosen, prices=pool.prices)
