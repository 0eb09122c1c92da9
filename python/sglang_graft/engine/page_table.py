"""Which pages each running request owns, on the host: the mirror of SGLang's `req_to_token`.

Targets (0.5.17): `allocation.alloc_for_extend` and `alloc_for_decode`, the only places that give a
running request new pages. Reason: with page numbers on the host, caching, freeing and evicting
need no copy from the device and no synchronisation.

A row covers the tokens of one request from `cache_protected_len` on. Everything before belongs to
the tree.
"""

from collections.abc import Iterable
from typing import Any

from sglang_graft.cache.shares import Share
from sglang_graft.engine.hooks import Hook


class PageTable:
    """Pages that running requests own beyond their cached prefix, by `req_pool_idx`.

    Counts them in the share of each request, which is known from its first pages on.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[int]] = {}
        self._shares: dict[int, Share] = {}

    def extend(
        self, rows: Iterable[int], new_pages: Iterable[list[int]], shares: Iterable[Share]
    ) -> None:
        """Append the pages that an allocation gave to each request."""
        for row, pages, share in zip(rows, new_pages, shares, strict=True):
            self._rows.setdefault(row, []).extend(pages)
            self._shares.setdefault(row, share).running += len(pages)

    def replace(self, row: int, pages: list[int]) -> None:
        """What remains a request's own after a part of it went to the tree."""
        if row in self._shares:
            self._shares[row].running += len(pages) - len(self.get(row))
        self._rows[row] = pages

    def get(self, row: int) -> list[int]:
        """The request's own pages, in token order."""
        return self._rows.get(row, [])

    def pop(self, row: int) -> list[int]:
        """Forget a request and return its own pages."""
        pages = self._rows.pop(row, [])
        share = self._shares.pop(row, None)
        if share is not None:
            share.running -= len(pages)
        return pages

    def pages(self) -> int:
        """Pages of all running requests together."""
        return sum(map(len, self._rows.values()))

    def clear(self) -> None:
        """Forget every request; a flush happens only when none runs."""
        assert not self._rows, f"{len(self._rows)} requests still own pages at clear()"

    def check_invariants(self, shares: Iterable[Share]) -> None:
        """Assert that every share counts the pages of its running requests."""
        found: dict[Share, int] = {}
        for row, share in self._shares.items():
            found[share] = found.get(share, 0) + len(self.get(row))
        for share in shares:
            assert share.running == found.get(share, 0), (
                f"share {share.name!r} counts {share.running} running pages, its requests own"
                f" {found.get(share, 0)}"
            )


def after_extend(result: Any, batch: Any) -> None:
    """AFTER `alloc_for_extend(batch)`, which returns ids, and rows on the device and the host."""
    cache = batch.tree_cache
    cache.incoming = {}
    shares = map(cache.tenancy.share, batch.reqs)
    cache.page_table.extend(result[2].tolist(), cache.token_to_kv_pool_allocator.last_rows, shares)


def after_decode(result: Any, batch: Any, token_per_req: int) -> None:
    """AFTER `alloc_for_decode(batch, token_per_req)`."""
    assert token_per_req == 1, f"one token a step, got {token_per_req}: speculation was refused"
    cache = batch.tree_cache
    rows = [req.req_pool_idx for req in batch.reqs]
    shares = map(cache.tenancy.share, batch.reqs)
    cache.page_table.extend(rows, cache.token_to_kv_pool_allocator.last_rows, shares)


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
