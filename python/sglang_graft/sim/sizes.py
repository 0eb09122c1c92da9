"""Bytes and pages of a modelled server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Default: Llama-3.1-8B in bf16, all linear modules adapted."""

    kv_bytes_per_token: int = 128 * 1024
    adapter_bytes_per_rank: int = 84_000_000 // 16
    page_tokens: int = 16

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.kv_bytes_per_token * self.page_tokens

    def adapter_pages(self, rank: int) -> int:
        """Pages of an adapter of this rank."""
        return -(-rank * self.adapter_bytes_per_rank // self.page_bytes)

    def pages(self, gigabytes: float) -> int:
        """Whole pages in a budget of 1e9-byte gigabytes."""
        return int(gigabytes * 1e9) // self.page_bytes

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` need."""
        return -(-tokens // self.page_tokens)
