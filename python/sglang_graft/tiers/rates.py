"""What it costs, in seconds, to bring KV back: by a copy from the host, or by computing it anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Rates(Protocol):
    """Prices that all ranks share; they change only where all ranks change them alike."""

    def load_seconds(self, nbytes: int) -> float:
        """A copy of `nbytes` from the host pool to the device."""

    def prefill_seconds(self, tokens: int, depth: int) -> float:
        """Computing the KV of `tokens` tokens that follow `depth` others."""


@dataclass(frozen=True, slots=True)
class FixedRates:
    """Constant rates. The defaults: one H200 with pinned memory, an 8B model (docs: design)."""

    load_bytes_per_second: float = 50e9
    prefill_tokens_per_second: float = 40e3
    attention_tokens: float = 16e3
    """Depth at which attention doubles the price of a token."""

    def load_seconds(self, nbytes: int) -> float:
        return nbytes / self.load_bytes_per_second

    def prefill_seconds(self, tokens: int, depth: int) -> float:
        mean = depth + tokens / 2
        return tokens * (1 + mean / self.attention_tokens) / self.prefill_tokens_per_second
