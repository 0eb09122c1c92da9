"""Which pages each running request owns, on the host: the mirror of SGLang's `req_to_token`.

Targets (0.5.17): `allocation.alloc_for_extend` and `alloc_for_decode`, the only places that give a
running request new pages. Reason: with page numbers on the host, caching, freeing and evicting
need no copy from the device and no synchronisation.

A row covers the tokens of one request from `cache_protected_len` on. Everything before belongs to
the tree.
"""

from collections.abc import Iterable
from typing import Any

from sglang_graft.engine.hooks import Hook


class PageTable:
    """Pages that running requests own beyond their cached prefix, by `req_pool_idx`."""

    def __init__(self) -> None:
        self._rows: dict[int, list[int]] = {}

    def extend(self, rows: Iterable[int], new_pages: Iterable[list[int]]) -> None:
        """Append the pages that an allocation gave to each request."""
        for row, pages in zip(rows, new_pages, strict=True):
            self._rows.setdefault(row, []).extend(pages)

    def replace(self, row: int, pages: list[int]) -> None:
        """What remains a request's own after a part of it went to the tree."""
        self._rows[row] = pages

    def get(self, row: int) -> list[int]:
        """The request's own pages, in token order."""
        return self._rows.get(row, [])

    def pop(self, row: int) -> list[int]:
        """Forget a request and return its own pages."""
        return self._rows.pop(row, [])

    def pages(self) -> int:
        """Pages of all running requests together."""
        return sum(map(len, self._rows.values()))

    def clear(self) -> None:
        """Forget every request; a flush happens only when none runs."""
        assert not self._rows, f"{len(self._rows)} requests still own pages at clear()"


def after_extend(result: Any, batch: Any) -> None:
    """AFTER `alloc_for_extend(batch)`, which returns ids, and rows on the device and the host."""
    cache = batch.tree_cache
    cache.page_table.extend(result[2].tolist(), cache.token_to_kv_pool_allocator.last_rows)


def after_decode(result: Any, batch: Any, token_per_req: int) -> None:
    """AFTER `alloc_for_decode(batch, token_per_req)`."""
    assert token_per_req == 1, f"one token a step, got {token_per_req}: speculation was refused"
    cache = batch.tree_cache
    rows = [req.req_pool_idx for req in batch.reqs]
    cache.page_table.extend(rows, cache.token_to_kv_pool_allocator.last_rows)


HOOKS = (
    Hook(
        target="sglang.srt.mem_cache.allocation.alloc_for_extend",
        kind="after",
        function=after_extend,
        parameters=("batch",),
        reason="page numbers of a prefill, on the host",
    ),
    Hook(
        target="sglang.srt.mem_cache.allocation.alloc_for_decode",
        kind="after",
        function=after_decode,
        parameters=("batch", "token_per_req"),
        reason="page numbers of a decode step, on the host",
    ),
)
