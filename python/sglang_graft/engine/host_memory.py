"""How much host memory there is, and how much of it the host pool takes."""

from pathlib import Path

import psutil

from sglang_graft.pool import Arena
from sglang_graft.tiers import HostPool
from sglang_graft.tiers.host_pool import default_bytes, pages_for

GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")


def free_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes that this process may still take: of the machine, and of its control group."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except OSError:
        return free  # no control group of version 2
    return free if limit == "max" else max(0, min(free, int(limit) - used))


def make_host_pool(arena: Arena, wanted_gb: float) -> HostPool:
    """The host pool of a server; `wanted_gb` 0 leaves its size to us."""
    free, page_bytes = free_bytes(), arena.layout.page_bytes
    size = int(wanted_gb * GIB) or default_bytes(free, arena.buffer.numel())
    if size > free:
        raise ValueError(
            f"--graft-host-memory-gb: wanted at most the {free / GIB:.1f} GiB that are free, got"
            f" {size / GIB:.1f}"
        )
    return HostPool(pages_for(size, page_bytes), page_bytes, pin=arena.buffer.device.type == "cuda")
