"""The scheduler's answer to one question, within a bound, also while the scheduler is busy.

A scheduler in the middle of a long forward answers late, a hung one never. Whoever asks for metrics
gets the last answer then, marked as old.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PATIENCE_SECONDS = 2.0


class Latest(NamedTuple):
    """data: the last answer, None when there was none.   age: of it, in seconds (since the start
    when there was none).   stale: whether the scheduler did not answer this time."""

    data: dict[str, Any] | None
    age: float
    stale: bool


@dataclass
class Snapshots:
    """One question. Those who ask while an answer is on its way wait for the same one.

    An answer that is younger than `reuse` seconds is given again. A question that was not answered
    in time stays open, so a hung scheduler has one message of ours in its queue, not one a scrape.
    """

    ask: Callable[[], Awaitable[dict[str, Any]]]
    patience: float = PATIENCE_SECONDS
    reuse: float = 0.0
    now: Callable[[], float] = time.monotonic
    _data: dict[str, Any] | None = None
    _at: float = field(init=False)
    _open: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._at = self.now()

    async def latest(self) -> Latest:
        """Ask, and wait at most `patience` seconds. Errors of `ask` are the caller's."""
        if self._data is not None and self.now() - self._at < self.reuse:
            return Latest(self._data, self.now() - self._at, False)
        if self._open is None:
            self._open = asyncio.ensure_future(self._ask())
        task = self._open
        await asyncio.wait({task}, timeout=self.patience)
        if not task.done():
            return Latest(self._data, self.now() - self._at, True)
        task.result()
        return Latest(self._data, self.now() - self._at, False)

    async def _ask(self) -> None:
        try:
            data = await self.ask()
        finally:
            self._open = None
        self._data, self._at = data, self.now()
