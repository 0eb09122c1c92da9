"""Many adapters in a row, read by threads ahead of the one who registers them: for the start."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class ReadAhead(Generic[Item, Result]):
    """`read` of each item, in the order of the items, whichever thread ends first.

    Each item says how many bytes it holds while it is read and until it is done with. So many start
    that these come to at most `nbytes`; one that is larger is read alone. As a context it closes at
    its end.
    """

    def __init__(
        self,
        read: Callable[[Item], Result],
        items: Iterable[tuple[Item, int]],
        *,
        threads: int,
        nbytes: int,
    ) -> None:
        self._read = read
        self._waiting = deque(items)
        self._nbytes = nbytes
        self._held = 0
        self._started: deque[tuple[Future[Result], int]] = deque()
        self._taken: deque[int] = deque()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="graft-start")
        self._start()

    def __enter__(self) -> ReadAhead[Item, Result]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def has_begun(self) -> bool:
        """Whether the next result is being read, or there; else there is no room, or no item."""
        return bool(self._started)

    @property
    def is_ready(self) -> bool:
        """Whether `take` would not wait."""
        return self.has_begun and self._started[0][0].done()

    @property
    def error(self) -> BaseException | None:
        """What `take` would raise; only where the next result `is_ready`."""
        assert self.is_ready, "the next read has not ended"
        return self._started[0][0].exception()

    def take(self) -> Result:
        """Wait for the next result, or raise what its read raised."""
        assert self._started, "a result was taken that nothing reads"
        future, nbytes = self._started.popleft()
        self._taken.append(nbytes)
        return future.result()

    def done_with(self) -> None:
        """The caller holds no bytes any more of the result that it took first."""
        assert self._taken, "nothing was taken that is not done with"
        self._held -= self._taken.popleft()
        self._start()

    def close(self) -> None:
        """Reads that have not begun are dropped, and the others waited for."""
        self._waiting.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def check_invariants(self) -> None:
        """Assert the bound, and that nothing waits while nothing is held."""
        sizes = [*self._taken, *(nbytes for _, nbytes in self._started)]
        assert sum(sizes) == self._held, f"{sizes} bytes are held, counted {self._held}"
        alone = sum(sizes) == max(sizes, default=0)
        assert alone or self._held <= self._nbytes, f"{sizes} bytes are held of {self._nbytes}"
        assert sizes or not self._waiting, f"{self._waiting} wait in vain"

    def _start(self) -> None:
        while self._waiting:
            item, nbytes = self._waiting[0]
            if self._held and self._held + nbytes > self._nbytes:
                return
            self._waiting.popleft()
            self._held += nbytes
            self._started.append((self._pool.submit(self._read, item), nbytes))
