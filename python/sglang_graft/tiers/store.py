"""Adapters from disk into host memory, in threads: the scheduler loop never reads a file.

A job has two steps, each in a worker: `read` (files to a checked and packed image in memory of its
own) and `fill` (image into pages of the host pool). Between them the loop, which alone owns the
ledgers, finds the pages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sglang_graft.adapters import Adapter, AdapterImage

# What a file can do to us: not there, not an adapter, no memory for it. All else is our own fault.
EXPECTED = (OSError, ValueError, RuntimeError, MemoryError)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A read adapter. `image` holds no bytes: they are `pages`, uint8 `[n, page_bytes]`."""

    image: AdapterImage
    pages: torch.Tensor
    max_rank: int
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, adapter: Adapter, image: AdapterImage) -> Packed:
        """Part the bytes of a packed adapter from the rest of it."""
        # The pointer table looks at the number of rows, not at the bytes.
        bare = replace(image, pages=image.pages.new_empty((len(image.pages), 0)))
        return cls(bare, image.pages, adapter.max_rank, adapter.warnings)


@dataclass(slots=True, eq=False)
class Reading:
    """One job, shared by all that wait for the same adapter; at its end `packed` or `error`."""

    key: str
    path: Path
    packed: Packed | None = None
    error: Exception | None = None
    abandoned: bool = False
    seconds: float = 0.0
    _future: Future[Packed] | None = None


def _alone(count: int) -> int:
    return count


def _unheard(nbytes: int, seconds: float) -> None:
    """Nobody measures."""


@dataclass(slots=True)
class AdapterStore:
    """At most `workers` jobs run and at most `in_memory` adapters wait between disk and host pool.

    So memory outside the host pool is bounded by `in_memory` adapters, twice each while it is
    packed. Without an `executor` it makes threads of its own. Jobs end in the order in which they
    were asked for, so that ranks which `agree` on the number of ended jobs see the same ones.
    """

    read: Callable[[Path], Packed]
    write: Callable[[Sequence[int], torch.Tensor], None]
    workers: int = 2
    in_memory: int = 4
    agree: Callable[[int], int] = _alone
    executor: Executor | None = None
    on_read: Callable[[int, float], None] = _unheard
    """Told the bytes and the seconds of each read that has ended well, packing included."""
    reads: int = 0
    fills: int = 0
    """Images whose copy into the host pool has begun. They end in this order."""
    _pool: Executor = field(init=False)
    _waiting: deque[Reading] = field(default_factory=deque)
    _reading: deque[Reading] = field(default_factory=deque)
    _by_key: dict[str, Reading] = field(default_factory=dict)
    _held: int = 0
    _filling: deque[tuple[Future[None], Callable[[], None], bool]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        if self.workers < 1 or self.in_memory < 1:
            raise ValueError(
                f"adapter store: wanted at least one worker and one adapter in memory, got"
                f" {self.workers} and {self.in_memory}"
            )
        self._pool = self.executor or ThreadPoolExecutor(
            self.workers, thread_name_prefix="graft-adapters"
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is being read, filled or kept in between."""
        return not (self._waiting or self._reading or self._filling or self._held)

    def request(self, key: str, path: Path) -> Reading:
        """Read the adapter at `path`, unless a job with this key is under way: then that one."""
        job = self._by_key.get(key)
        if job is None:
            job = self._by_key[key] = Reading(key, path)
            self._waiting.append(job)
            self._start()
        return job

    def is_under_way(self, key: str) -> bool:
        """Whether a job with this key has not ended."""
        return key in self._by_key

    def abandon(self, key: str) -> None:
        """Nobody wants this job any more: its result is thrown away when it comes."""
        job = self._by_key.pop(key, None)
        if job is None:
            return
        job.abandoned = True
        if job in self._waiting:
            self._waiting.remove(job)

    def poll(self) -> list[Reading]:
        """Jobs whose read has ended, in the order of their requests; never waits.

        Whoever takes a `Packed` from here passes it on to `fill` or `forget`.
        """
        if not (self._filling or self._reading or self._waiting):
            return []  # on all ranks alike, so that they have nothing to agree upon
        for _ in range(self.agree(_ended(filling[0] for filling in self._filling))):
            future, done, foreign = self._filling.popleft()
            future.result()
            self._held -= not foreign
            done()
        ended = []
        futures = (job._future for job in self._reading if job._future)
        for _ in range(self.agree(_ended(futures))):
            job = self._reading.popleft()
            self._end(job)
            if not job.abandoned:
                ended.append(job)
        self._start()
        return ended

    def fill(
        self,
        packed: Packed,
        pages: Sequence[int],
        done: Callable[[], None],
        *,
        foreign: bool = False,
    ) -> None:
        """Copy the image into host pages; `done` is called by the `poll` that sees it finished.

        A `foreign` image was read by somebody else, who bounds how many there are.
        """
        future = self._pool.submit(self.write, list(pages), packed.pages)
        self._filling.append((future, done, foreign))
        self.fills += 1

    @property
    def filled(self) -> int:
        """Of `fills`, those that `poll` has seen ended."""
        return self.fills - len(self._filling)

    def wait(self) -> None:
        """Block until every image has been filled in: for the start, before anything runs."""
        while self._filling:
            self._filling[0][0].result()
            self.poll()

    def forget(self, packed: Packed) -> None:
        """The caller drops an image that it does not need after all."""
        self._held -= 1
        assert self._held >= 0, f"an image was forgotten twice: {packed.image.identity}"

    def close(self) -> None:
        """End the threads; jobs that have not begun are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def check_invariants(self) -> None:
        """Assert the bounds, and that every listed job is waiting or being read."""
        assert 0 <= self._held + len(self._reading) <= self.in_memory, (
            f"{self._held} adapters held and {len(self._reading)} being read, of {self.in_memory}"
        )
        jobs = [*self._waiting, *self._reading]
        listed = [job for job in jobs if not job.abandoned]
        assert {job.key: job for job in listed} == self._by_key, "jobs and their index disagree"

    def _start(self) -> None:
        while self._waiting and self._held + len(self._reading) < self.in_memory:
            job = self._waiting.popleft()
            job._future = self._pool.submit(self._timed, job)
            self._reading.append(job)
            self.reads += 1

    def _timed(self, job: Reading) -> Packed:
        """In a worker."""
        start = time.perf_counter()
        packed = self.read(job.path)
        job.seconds = time.perf_counter() - start
        return packed

    def _end(self, job: Reading) -> None:
        assert job._future is not None, f"job {job.key} has ended before it began"
        error = job._future.exception()
        if error is not None and not isinstance(error, EXPECTED):
            raise error
        job.error = error
        if not job.abandoned:
            del self._by_key[job.key]
            if error is None:
                job.packed = job._future.result()
                self._held += 1
                self.on_read(job.packed.pages.numel(), job.seconds)
        job._future = None


def _ended(futures: Iterable[Future[Any]]) -> int:
    """How many of the first futures have ended."""
    count = 0
    for future in futures:
        if not future.done():
            break
        count += 1
    return count
