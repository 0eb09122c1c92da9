"""Host memory for adapter images and KV that is not, or not only, on the device."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_graft.pool import PageLedger

DEFAULT_FRACTION = 0.4
"""Share of the memory that is free at start, unless the user says how much."""
DEFAULT_ARENAS = 2.0
"""At most this many times the arena's bytes by default: more would hold KV that nobody asks for."""
MOST_THREADS = 16
"""That touch new memory: some cores' worth is all that memory can take."""
_GIB = 1 << 30
_SYSTEM_PAGE = mmap.PAGESIZE

logger = logging.getLogger(__name__)


def default_bytes(free_bytes: int, arena_bytes: int) -> int:
    """Host pool of a server whose user does not choose: a share of `free_bytes`, capped."""
    return int(min(free_bytes * DEFAULT_FRACTION, arena_bytes * DEFAULT_ARENAS))


def pages_for(nbytes: int, page_bytes: int) -> int:
    """Whole pages in `nbytes`; ValueError unless there is at least one."""
    pages = nbytes // page_bytes
    if pages < 1:
        raise ValueError(
            f"--graft-host-memory-gb: wanted room for at least one page of {page_bytes:,} bytes,"
            f" got {nbytes:,} bytes"
        )
    return pages


class HostPool:
    """`pages` pages of `page_bytes` in one buffer, pinned if the device is a GPU, and their ledger.

    `buffer` is uint8 `[pages, page_bytes]`. Page numbers are the ledger's, from 1 on as in the
    arena; page p is row p - 1. Rows start with whatever the memory held: a row is read only after
    all of it was written.
    """

    def __init__(self, pages: int, page_bytes: int, *, pin: bool) -> None:
        if pages < 1:
            raise ValueError(f"host pool: wanted at least 1 page, got {pages}")
        self.page_bytes = page_bytes
        try:
            memory = np.empty((pages, page_bytes), dtype=np.uint8)
        except MemoryError as error:
            size = pages * page_bytes / _GIB
            raise ValueError(
                f"--graft-host-memory-gb: wanted memory that the machine can give, got {size:.1f}"
                f" GiB: {error}"
            ) from error
        self.ledger = PageLedger(pages + 1)
        self.buffer = torch.from_numpy(memory)
        self._rows = memory
        if pin:
            start = time.perf_counter()
            commit(memory, os.cpu_count() or 1)
            committed = time.perf_counter()
            _pin(self.buffer)
            logger.info(
                "Host pool: %.1f GiB, given by the system in %.1f s, page-locked in %.1f s",
                memory.nbytes / _GIB,
                committed - start,
                time.perf_counter() - committed,
            )

    def row(self, page: int) -> torch.Tensor:
        """The bytes of one page, uint8 `[page_bytes]`. Shares memory."""
        assert 1 <= page <= len(self.buffer), f"host page {page} is outside of the pool"
        return self.buffer[page - 1]

    def write(self, pages: Sequence[int], image: torch.Tensor) -> None:
        """Copy row i of `image` `[len(pages), page_bytes]` into page `pages[i]`, at once.

        Safe in any thread that the pages were handed to.
        """
        assert len(pages) == len(image), f"{len(image)} rows for {len(pages)} pages"
        # By numpy: torch would wake a team of threads for each row where it may have several.
        for page, source in zip(pages, image.numpy(), strict=True):
            assert 1 <= page <= len(self._rows), f"host page {page} is outside of the pool"
            self._rows[page - 1] = source


def commit(memory: npt.NDArray[np.uint8], threads: int) -> None:
    """Have the system give all of `memory`, which is new, by a write to each of its pages.

    Page-locking would do it too, in one thread: most of its time is the zeroing of pages.
    """
    flat = memory.reshape(-1)
    parts = np.array_split(flat, min(threads, MOST_THREADS))

    def touch(part: npt.NDArray[np.uint8]) -> None:
        part[::_SYSTEM_PAGE] = 0

    with ThreadPoolExecutor(len(parts), thread_name_prefix="graft-commit") as pool:
        for _ in pool.map(touch, parts):
            pass


def _pin(buffer: torch.Tensor) -> None:
    """Page-lock memory that is there already.

    torch's own pinned allocator rounds sizes up to a power of two, which would take up to twice the
    memory that the user granted.
    """
    size = buffer.numel()
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = cudart.cudaHostRegister(buffer.data_ptr(), size, 0)
    if int(error) != 0:
        raise ValueError(
            f"--graft-host-memory-gb: {size / _GIB:.1f} GiB of host memory could not be pinned"
            f" (CUDA error {int(error)}); ask for less, or raise the limit of locked memory"
            " (ulimit -l)"
        )
