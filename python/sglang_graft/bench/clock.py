"""Time as the player sees it, so that tests can move it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from any origin."""

    def now(self) -> float:
        """The time."""

    async def sleep_until(self, when: float) -> None:
        """Return once `now()` has reached `when`."""


class RealClock:
    """The monotonic clock of this machine."""

    def now(self) -> float:
        """See Clock."""
        return time.perf_counter()

    async def sleep_until(self, when: float) -> None:
        """See Clock."""
        while (left := when - self.now()) > 0:
            await asyncio.sleep(left)
