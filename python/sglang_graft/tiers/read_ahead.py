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
    that these come to at most `nbytes`; one that is larger is read alone. As a context: at its end
    reads that have not begun are dropped, and the others waited for.
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
        self._taken = 0
        self._started: deque[tuple[Future[Result], int]] = deque()
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
        self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self) -> Result:
        """Wait for the next result, or raise what its read raised. The one before is done with."""
        self._held -= self._taken
        self._start()
        assert self._started, "more results were taken than there are items"
        future, self._taken = self._started.popleft()
        return future.result()

    def check_invariants(self) -> None:
        """Assert the bound, and that nothing waits while nothing is read."""
        sizes = [self._taken, *(nbytes for _, nbytes in self._started)]
        assert sum(sizes) == self._held, f"{sizes} bytes are held, counted {self._held}"
        alone = sum(sizes) == max(sizes)
        assert alone or self._held <= self._nbytes, f"{sizes} bytes are held of {self._nbytes}"
        assert self._started or self._taken or not self._waiting, f"{self._waiting} wait in vain"

    def _start(self) -> None:
        while self._waiting:
            item, nbytes = self._waiting[0]
            if self._held and self._held + nbytes > self._nbytes:
                return
            self._waiting.popleft()
            self._held += nbytes
            self._started.append((self._pool.submit(self._read, item), nbytes))
