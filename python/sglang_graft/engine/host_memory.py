"""How much host memory there is, and how much of it the host pool takes.

Target (0.5.17): BEFORE `ModelRunner.load_model`. Reason: with a GPU, gigabytes of host memory have
to be given by the system and page-locked, seconds of work that threads can do beside the loading of
the weights. Only how much it is at most is known there: the arena's size follows the weights'.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from sglang_graft import config
from sglang_graft.engine.hooks import Hook
from sglang_graft.engine.start import stop_at_end
from sglang_graft.pool import Arena
from sglang_graft.tiers import HostPool, Reserve
from sglang_graft.tiers.host_pool import default_bytes, pages_for

GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")
EARLY_SHARE = 4
"""Cores over the threads that touch host memory while weights are loaded: that needs memory too."""


@dataclass(frozen=True, slots=True)
class Early:
    """Memory that was begun with, and how much of the machine's was free then, in bytes."""

    reserve: Reserve
    free: int


_early: list[Early] = []


def free_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes that this process may still take: of the machine, and of its control group."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except OSError:
        return free  # no control group of version 2
    return free if limit == "max" else max(0, min(free, int(limit) - used))


def wanted_bytes(wanted_gb: float, free: int, arena_bytes: int) -> int:
    """Size of the host pool; `wanted_gb` 0 leaves it to us. ValueError when more than is free."""
    size = int(wanted_gb * GIB) or default_bytes(free, arena_bytes)
    if size > free:
        raise ValueError(
            f"--graft-host-memory-gb: wanted at most the {free / GIB:.1f} GiB that are free, got"
            f" {size / GIB:.1f}"
        )
    return size


def begin_reserve(wanted_gb: float, device_bytes: int) -> Early:
    """Begin with as much host memory as the pool beside a device of `device_bytes` takes at most.

    Threads that touch it end with the start.
    """
    free = free_bytes()
    reserve = Reserve(max(1, wanted_bytes(wanted_gb, free, device_bytes)))
    reserve.employ(max(1, (os.cpu_count() or 1) // EARLY_SHARE))
    stop_at_end(reserve.stop)
    return Early(reserve, free)


def make_host_pool(arena: Arena, wanted_gb: float, early: Early | None = None) -> HostPool:
    """The host pool of a server, in memory that was begun with `early`, if any: then `wait` for it.

    What was free before the weights were loaded counts, if it is known.
    """
    page_bytes, device = arena.layout.page_bytes, arena.buffer.device
    free = free_bytes() if early is None else early.free
    pages = pages_for(wanted_bytes(wanted_gb, free, arena.buffer.numel()), page_bytes)
    if early is None:
        return HostPool(pages, page_bytes, pin=device.type == "cuda")
    return HostPool.beside(pages, page_bytes, early.reserve, device)


def early() -> Early | None:
    """What was begun before the weights were loaded; None on the CPU."""
    return _early[0] if _early else None


def before_weights(self: Any) -> None:
    """BEFORE `ModelRunner.load_model`."""
    if self.device != "cuda":
        return
    assert not _early, "this process has begun with host memory already"
    options = config.published()
    assert options is not None, "weights are loaded, but no options were published"
    device_bytes = torch.cuda.get_device_properties(self.gpu_id).total_memory
    _early.append(begin_reserve(options.host_memory_gb, device_bytes))


HOOKS = (
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        kind="before",
        function=before_weights,
        parameters=("self",),
        reason="host memory is made ready beside the loading of the weights",
    ),
)
