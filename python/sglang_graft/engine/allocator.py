"""The allocator that SGLang sees: page numbers live on the host, only token ids go to the device.

Target (0.5.17): `KVCacheConfigurator._build_token_to_kv_pool_allocator`. Reason: adapters, cached
KV and running KV take pages from one ledger, in any order, without asking the device for page
numbers. SGLang's own paged allocator keeps its free list on the device and needs Triton. SGLang
calls `alloc` alone, see `single_tokens`.
"""

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

from sglang_graft.engine.hooks import Hook
from sglang_graft.engine.pool import Pool, get_pool
from sglang_graft.pool import Owner

IdArray = npt.NDArray[np.int64]
_ID_BYTES = 8


class Growth(NamedTuple):
    """Tokens `start` to `end` of a request, and the page of its own that `start` lies in.

    page: None where `start` begins a page.
    """

    start: int
    end: int
    page: int | None


def upload(ids: IdArray, device: torch.device | str) -> torch.Tensor:
    """Host ids as an int64 tensor on `device`, without waiting for the copy."""
    if not len(ids):
        return torch.empty(0, dtype=torch.int64, device=device)  # no pinned memory, no copy
    return _move(torch.from_numpy(np.ascontiguousarray(ids)), device)


def upload_list(ids: list[int], device: torch.device | str) -> torch.Tensor:
    """The same for a few of them in a list, not none."""
    if _is_cuda(device):
        host = torch.tensor(ids, dtype=torch.int64, pin_memory=True)
        return host.to(device, non_blocking=True)
    # Between two forwards `torch.tensor` takes twice as long as this.
    return torch.frombuffer(array("q", ids), dtype=torch.int64)


def _move(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    return host.pin_memory().to(device, non_blocking=True) if _is_cuda(device) else host


def _is_cuda(device: torch.device | str) -> bool:
    # Making a `torch.device` of a name, only to look at it, costs as much as a small tensor.
    return (device if isinstance(device, str) else device.type).startswith("cuda")


class ArenaAllocator(BaseTokenToKVPoolAllocator):
    """Token ids for running requests, out of the pool's ledger.

    After each allocation `last_rows` holds, for each request of the batch in order, the pages that
    it got; `page_table` moves them into the requests' rows.
    """

    def __init__(self, pool: Pool, size: int, dtype: torch.dtype, device: str, kvcache: Any):
        super().__init__(size, pool.layout.page_tokens, dtype, device, kvcache, need_sort=False)
        self.pool = pool
        self.last_rows: list[list[int]] = []
        self._expected: list[Growth] = []
        layout = pool.layout
        # One look-up where the arithmetic of `dense_ids` takes four calls of numpy.
        ids = layout.dense_ids(range(pool.ledger.pages))
        self._ids_of_page = ids.reshape(-1, layout.page_tokens)
        self._id_bytes = ids.data.cast("B")

    @property
    def free_pages(self) -> torch.Tensor:
        """Free pages as SGLang's checks number them: `dense id // page_size`."""
        pages = np.asarray(self.pool.ledger.pages_of(Owner.FREE), dtype=np.int64)
        stride = self.pool.layout.ids_per_page // self.page_size
        return upload(pages * stride, self.device)

    @free_pages.setter
    def free_pages(self, value: None) -> None:
        # The base class assigns None in its constructor; the ledger is the free list.
        assert value is None, "free pages belong to the ledger"

    @property
    def release_pages(self) -> torch.Tensor:
        """Always empty: a freed page is free at once."""
        return torch.empty(0, dtype=torch.int64, device=self.device)

    @release_pages.setter
    def release_pages(self, value: None) -> None:
        assert value is None, "free pages belong to the ledger"

    def available_size(self) -> int:
        """Tokens that can be allocated without evicting anything."""
        return self.pool.ledger.free * self.page_size

    def clear(self) -> None:
        """After a flush: nothing may still be running on the pool."""
        running = self.pool.ledger.count(Owner.KV_RUNNING)
        assert running == 0, f"{running} pages still belong to running requests at clear()"

    def expect(self, growths: list[Growth]) -> None:
        """What the next `alloc` is for; `single_tokens` says it."""
        self._expected = growths

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Ids `[need_size]` for what was expected, request after request, or None: no room.

        All are made on the host: it knows the page in which a request goes on.
        """
        growths, self._expected = self._expected, []
        lengths = [growth.end - growth.start for growth in growths]
        assert sum(lengths) == need_size, f"expected {sum(lengths)} tokens, asked for {need_size}"
        size = self.page_size
        counts = [-(-growth.end // size) - -(-growth.start // size) for growth in growths]
        taken = self.pool.ledger.take(sum(counts), Owner.KV_RUNNING)
        if taken is None:
            return None
        self.last_rows = _split(taken, counts)
        if lengths == [1] * len(lengths):
            return self._ids_of_steps(growths)
        rows = [
            new if growth.page is None else [growth.page, *new]
            for growth, new in zip(growths, self.last_rows, strict=True)
        ]
        if len(rows) == 1:
            return self._ids_of_one(rows[0], growths[0])
        parts = [
            self._ids(pages, growth.start % size, length)
            for growth, pages, length in zip(growths, rows, lengths, strict=True)
        ]
        return upload(np.concatenate(parts), self.device)

    def free(self, free_index: torch.Tensor) -> None:
        """Free the pages of device ids. Waits for the device; the tree frees by page instead."""
        ids = free_index.cpu().numpy().astype(np.int64)
        pages = np.unique(self.pool.layout.page_numbers(ids)).tolist()
        self.pool.ledger.give(pages, Owner.KV_RUNNING)

    def _ids(self, pages: list[int], skip: int, tokens: int) -> IdArray:
        return self._ids_of_page.take(pages, axis=0).reshape(-1)[skip : skip + tokens]

    def _ids_of_one(self, pages: list[int], growth: Growth) -> torch.Tensor:
        """The same on the device, for a request alone: numpy's first calls take twice as long."""
        ids, width = self._id_bytes, self.page_size * _ID_BYTES
        joined = bytearray().join([ids[page * width : (page + 1) * width] for page in pages])
        skip = growth.start % self.page_size
        del joined[(skip + growth.end - growth.start) * _ID_BYTES :]
        del joined[: skip * _ID_BYTES]
        return _move(torch.frombuffer(joined, dtype=torch.int64), self.device)

    def _ids_of_steps(self, growths: list[Growth]) -> torch.Tensor:
        """The same for one token each."""
        # Plain lists: between two forwards numpy's first calls cost more than a batch of them.
        size, stride = self.page_size, self.pool.layout.ids_per_page
        pages = [
            new[0] if growth.page is None else growth.page
            for growth, new in zip(growths, self.last_rows, strict=True)
        ]
        ids = [
            page * stride + growth.start % size for growth, page in zip(growths, pages, strict=True)
        ]
        return upload_list(ids, self.device)


def _split(pages: list[int], counts: Sequence[int]) -> list[list[int]]:
    """The next `counts[i]` pages for request i."""
    ends = list(accumulate(counts))
    return [pages[end - count : end] for end, count in zip(ends, counts, strict=True)]


def build_allocator(
    original: Callable[..., Any],
    self: Any,
    *,
    sizes: Any,
    token_to_kv_pool: Any,
    is_dsv4_model: bool,
    req_to_token_pool: Any,
    token_to_kv_pool_allocator: Any,
) -> ArenaAllocator:
    """AROUND `_build_token_to_kv_pool_allocator`."""
    assert token_to_kv_pool_allocator is None, "a draft worker was refused at start"
    return ArenaAllocator(
        get_pool(),
        sizes.max_total_num_tokens,
        dtype=self.kv_cache_dtype,
        device=self.device,
        kvcache=token_to_kv_pool,
    )


HOOKS = (
    Hook(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
        "._build_token_to_kv_pool_allocator",
        kind="around",
        function=build_allocator,
        parameters=(
            "self",
            "sizes",
            "token_to_kv_pool",
            "is_dsv4_model",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
        ),
        reason="pages for running requests come from the shared ledger",
    ),
)
