"""What the scheduler loop notes for metrics: how long its passes take, and who waited for bytes.

Wall time is noted here and never decides anything. Cost: two clock reads a pass, and a few
dictionary operations a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from sglang_graft.tiers import SECONDS, Histogram


@dataclass(slots=True)
class Observations:
    """Of one scheduler. `now` is a clock in seconds that never goes back."""

    now: Callable[[], float] = time.perf_counter
    passes: int = 0
    """Turns of the loop that began while requests ran or waited."""
    pass_seconds: float = 0.0
    """From their beginning to the beginning of the next turn."""
    answers: int = 0
    """Questions of `engine/view` that were answered."""
    answer_seconds: float = 0.0
    wait_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """Of requests with an adapter: from being passed over first to their admission, else 0."""
    _began: float | None = None
    _waiting: dict[str, float] = field(default_factory=dict)

    def begin_pass(self, *, busy: bool) -> None:
        """A turn of the loop begins; `busy` when requests run or wait."""
        now = self.now()
        if self._began is not None:
            self.passes += 1
            self.pass_seconds += now - self._began
        self._began = now if busy else None

    def answer(self, question: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Answer a question of an observer, and note what that took."""
        began = self.now()
        found = question()
        self.answers += 1
        self.answer_seconds += self.now() - began
        return found

    def held_back(self, key: str) -> None:
        """A waiting request was passed over because its bytes are not on the device."""
        if key not in self._waiting:
            self._waiting[key] = self.now()

    def admitted(self, key: str, *, has_adapter: bool) -> None:
        """A request starts. Those of the base model have no adapter to wait for."""
        began = self._waiting.pop(key, None)
        if has_adapter:
            self.wait_seconds.observe(0.0 if began is None else self.now() - began)

    def keep(self, keys: Collection[str]) -> None:
        """Forget the wait of requests that are in the queue no more."""
        if self._waiting:
            self._waiting = {k: at for k, at in self._waiting.items() if k in keys}

    def report(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "passes": self.passes,
            "pass_seconds": self.pass_seconds,
            "answers": self.answers,
            "answer_seconds": self.answer_seconds,
            "wait_seconds": self.wait_seconds.report(),
            "held_back": len(self._waiting),
        }
