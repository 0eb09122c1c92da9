"""Adapters named at start: read by threads beside SGLang's own start, registered in their order.

Threads read and pack from the moment at which the arena exists. The scheduler's thread registers
what has been read whenever it passes by (`register_ready`: between two captures), and waits for the
rest at the end of the start (`finish`). So their bytes go to the host pool one after the other,
and never lie in memory all at once.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sglang.srt.lora.lora_registry import LoRARef

from sglang_graft.adapters import Adapter, AdapterImage, BaseWeight
from sglang_graft.adapters.location import file_bytes
from sglang_graft.engine.device_gate import DeviceGate
from sglang_graft.tiers import AdapterStore, ReadAhead

logger = logging.getLogger(__name__)

START_READERS = 8
"""Threads that read adapters at start. A part of each read is Python's own, one at a time."""
START_BYTES = 2 << 30
"""Bytes of files that are read at once at start.

With its image, each takes twice its bytes if it is of the model's dtype.
"""


class ReadAdapter(NamedTuple):
    """An adapter as read, its packed image, and how long that took."""

    adapter: Adapter
    image: AdapterImage
    seconds: float


class StartAdapters:
    """Those of `refs` that are not registered yet. Only the scheduler's thread calls it.

    `read` runs in threads, with base weights that wait for the gate. When `register` returns, the
    copy of the image into the host pool has begun in `store`, if there is room.
    """

    def __init__(
        self,
        refs: list[LoRARef],
        base_weight: BaseWeight | None,
        read: Callable[[LoRARef, BaseWeight | None], ReadAdapter],
        register: Callable[[LoRARef, ReadAdapter], object],
        store: AdapterStore,
    ) -> None:
        self.gate = DeviceGate()
        self._began = self._last_read = time.perf_counter()
        self._read_seconds = self._register_seconds = 0.0
        self._count = len(refs)
        self._refs = deque(refs)
        self._base_weight, self._read_one = base_weight, read
        self._register_one, self._store = register, store
        # For each result that was taken: the fill of the store that ends its stay in memory.
        self._fills: deque[int] = deque()
        self._reads = ReadAhead(
            self._timed,
            [(ref, file_bytes(Path(ref.lora_path))) for ref in refs],
            # One more than cores, because reads wait for the disk, too.
            threads=min(START_READERS, (os.cpu_count() or 1) + 1),
            nbytes=START_BYTES,
        )

    @property
    def is_finished(self) -> bool:
        """Whether every adapter is registered, and its bytes lie where they belong."""
        return not (self._refs or self._fills)

    def register_ready(self) -> None:
        """Register what has been read; never waits. Raises the error of the first bad adapter.

        Between captures SGLang takes a RuntimeError for one of its own, and adds advice on graphs.
        So such an error waits for `finish`.
        """
        self._let_go()
        while self._reads.is_ready and not isinstance(self._reads.error, RuntimeError):
            self._register_next()

    def finish(self) -> None:
        """Wait for all adapters, and register them. Raises the error of the first bad one."""
        start = time.perf_counter()
        self.gate.open()
        while self._refs:
            if not self._reads.has_begun:
                self._store.wait()
            self._let_go()
            self._register_next()
        self._store.wait()
        self._let_go()
        if self._count:
            logger.info(
                "%d adapters named at start: read and packed %.1f s after the arena was there"
                " (%.1f s of threads), registered in %.1f s, waited %.1f s for the last of them",
                self._count,
                self._last_read - self._began,
                self._read_seconds,
                self._register_seconds,
                time.perf_counter() - start,
            )
            self._count = 0

    def stop(self) -> None:
        """The start has ended, well or not: no thread reads on."""
        self._refs.clear()
        self.gate.stop()
        self._reads.close()

    def check_invariants(self) -> None:
        """Assert that what is held in memory is counted."""
        self._reads.check_invariants()
        assert list(self._fills) == sorted(self._fills), f"fills out of order: {self._fills}"

    def _timed(self, ref: LoRARef) -> ReadAdapter:
        """In a thread."""
        with self.gate.visit(self._base_weight) as base_weight:
            found = self._read_one(ref, base_weight)
        self._last_read = time.perf_counter()  # for the log alone
        return found

    def _register_next(self) -> None:
        read = self._reads.take()
        start = time.perf_counter()
        self._register_one(self._refs.popleft(), read)
        self._fills.append(self._store.fills)
        self._read_seconds += read.seconds
        self._register_seconds += time.perf_counter() - start

    def _let_go(self) -> None:
        """Whatever has landed in the host pool makes room for further reads."""
        ended = self._store.poll()
        assert not ended, f"{len(ended)} adapters were read again before any request"
        while self._fills and self._fills[0] <= self._store.filled:
            self._fills.popleft()
            self._reads.done_with()
