"""Host memory for adapter images and KV that is not, or not only, on the device."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_graft.pool import PageLedger
from sglang_graft.tiers.reserve import Reserve

DEFAULT_FRACTION = 0.4
"""Share of the memory that is free at start, unless the user says how much."""
DEFAULT_ARENAS = 2.0
"""At most this many times the arena's bytes by default: more would hold KV that nobody asks for."""
_GIB = 1 << 30

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
        rows = _plain_rows if not pin else _given_rows
        self._lay_out(rows(pages, page_bytes), page_bytes)
        if pin:
            _pin(self.buffer)

    @classmethod
    def beside(
        cls, pages: int, page_bytes: int, reserve: Reserve, device: torch.device
    ) -> HostPool:
        """A pool in the front of `reserve`, page-locked for `device` by a thread.

        Nobody may touch its bytes before `wait` has returned, which the caller must call.
        """
        pool = cls.__new__(cls)
        memory = reserve.cut(_size(pages, page_bytes))
        pool._lay_out(memory.reshape(pages, page_bytes), page_bytes)
        reserve.employ(os.cpu_count() or 1)
        thread = ThreadPoolExecutor(1, thread_name_prefix="graft-pin")
        pool._locking = thread.submit(_lock, reserve, pool.buffer, device)
        thread.shutdown(wait=False)
        return pool

    def _lay_out(self, rows: npt.NDArray[np.uint8], page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.ledger = PageLedger(len(rows) + 1)
        self.buffer = torch.from_numpy(rows)
        self._rows = rows
        self._locking: Future[float] | None = None

    def wait(self) -> None:
        """Block until a pool that was begun `beside` the start may be used. ValueError as there."""
        if self._locking is None:
            return
        start = time.perf_counter()
        locked = self._locking.result()
        self._locking = None
        logger.info(
            "Host pool: %.1f GiB, page-locked in %.1f s by a thread, waited %.1f s for it",
            self._rows.nbytes / _GIB,
            locked,
            time.perf_counter() - start,
        )

    def row(self, page: int) -> torch.Tensor:
        """The bytes of one page, uint8 `[page_bytes]`. Shares memory."""
        assert 1 <= page <= len(self.buffer), f"host page {page} is outside of the pool"
        return self.buffer[page - 1]

    def write(self, pages: Sequence[int], image: torch.Tensor) -> None:
        """Copy row i of `image` `[len(pages), page_bytes]` into page `pages[i]`, at once.

        Safe in any thread that the pages were handed to.
        """
        assert self._locking is None, "the host pool is written to before it is there"
        assert len(pages) == len(image), f"{len(image)} rows for {len(pages)} pages"
        # By numpy: torch would wake a team of threads for each row where it may have several.
        for page, source in zip(pages, image.numpy(), strict=True):
            assert 1 <= page <= len(self._rows), f"host page {page} is outside of the pool"
            self._rows[page - 1] = source


def _size(pages: int, page_bytes: int) -> int:
    if pages < 1:
        raise ValueError(f"host pool: wanted at least 1 page, got {pages}")
    return pages * page_bytes


def _plain_rows(pages: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that the system gives when it is first touched."""
    size = _size(pages, page_bytes)
    try:
        return np.empty((pages, page_bytes), dtype=np.uint8)
    except MemoryError as error:
        raise ValueError(
            f"--graft-host-memory-gb: wanted memory that the machine can give, got"
            f" {size / _GIB:.1f} GiB: {error}"
        ) from error


def _given_rows(pages: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that the system has given."""
    size = _size(pages, page_bytes)
    reserve = Reserve(size)
    reserve.employ(os.cpu_count() or 1)
    rows = reserve.cut(size)
    reserve.wait()
    return rows.reshape(pages, page_bytes)


def _lock(reserve: Reserve, buffer: torch.Tensor, device: torch.device) -> float:
    """In a thread: wait for the memory, page-lock it; the seconds of the latter."""
    reserve.wait()
    logger.info("Host pool: given by the system in %.1f s", reserve.seconds)
    start = time.perf_counter()
    # A thread begins with device 0, where any CUDA call would make a context.
    torch.cuda.set_device(device)
    _pin(buffer)
    return time.perf_counter() - start


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
