"""Memory that threads have the system give ahead of its use."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

MOST_THREADS = 16
"""That touch new memory: some cores' worth is all that memory can take."""
_BLOCK = 64 << 20
"""Bytes that a thread touches before it looks whether more is wanted."""
_SYSTEM_PAGE = mmap.PAGESIZE
_GIB = 1 << 30


class Reserve:
    """`nbytes` of fresh memory, given from its front by a write to each page of the system.

    Page-locking would do that too, in one thread: most of its time is the zeroing of pages. Who
    begins early may not know yet how much is wanted in the end: `cut` says so, and what lies behind
    goes back. ValueError when there is no such memory.
    """

    def __init__(self, nbytes: int) -> None:
        try:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"--graft-host-memory-gb: wanted memory that the machine can give, got"
                f" {nbytes / _GIB:.1f} GiB: {error}"
            ) from error
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, no more
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._memory = np.frombuffer(self._map, dtype=np.uint8)
        self._lock = threading.Lock()
        self._next, self._end = 0, nbytes
        self._threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="graft-commit")
        self._work: list[Future[float]] = []
        self._began = time.perf_counter()
        self.seconds = 0.0
        """From the first thread's begin to the last one's end, once `wait` has returned."""

    def __len__(self) -> int:
        return len(self._memory)

    def employ(self, threads: int) -> None:
        """Let so many threads work at it, in all."""
        if not self._work:
            self._began = time.perf_counter()
        for _ in range(min(threads, MOST_THREADS) - len(self._work)):
            self._work.append(self._threads.submit(self._touch))

    def cut(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """The first `nbytes`, which is all that is wanted; not to be used before `wait`."""
        assert 0 < nbytes <= len(self), f"{nbytes} bytes of a reserve of {len(self)}"
        with self._lock:
            self._end = nbytes
        return self._memory[:nbytes]

    def wait(self) -> None:
        """Block until all that is wanted is there, and give back the rest."""
        assert self._work, "nobody works at this reserve"
        ends = [job.result() for job in self._work]
        self.seconds = max(ends) - self._began
        self._threads.shutdown()
        rest = -(-self._end // _SYSTEM_PAGE) * _SYSTEM_PAGE
        if rest < len(self):
            self._map.madvise(mmap.MADV_DONTNEED, rest, len(self) - rest)

    def stop(self) -> None:
        """Nothing more is wanted: the threads end at once. Nothing to do after `wait`."""
        with self._lock:
            self._end = min(self._end, self._next)
        self._threads.shutdown()

    def _touch(self) -> float:
        while (start := self._take_block()) is not None:
            # In one call that lets go of Python's lock.
            self._memory[start : min(start + _BLOCK, len(self)) : _SYSTEM_PAGE] = 0
        return time.perf_counter()

    def _take_block(self) -> int | None:
        with self._lock:
            if self._next >= self._end:
                return None
            start, self._next = self._next, self._next + _BLOCK
            return start
