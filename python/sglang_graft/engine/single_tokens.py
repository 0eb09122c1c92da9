"""SGLang asks for ids as if pages held one token: what it prepares for larger ones costs more.

Target (0.5.17): `allocation._alloc_page_size`, which `alloc_for_extend` and `alloc_for_decode` ask
just before they allocate. Reason: for larger pages they look up on the device where each request's
last token lies, a handful of small tensors a batch. The page table knows it on the host.

Room is made here, as much as SGLang makes for pages, before it looks for room for the tokens alone.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.common import evict_from_tree_cache

from sglang_graft.engine.allocator import Growth
from sglang_graft.engine.hooks import Hook
from sglang_graft.engine.page_table import PageTable


def alloc_page_size(original: Callable[..., int], batch: Any) -> int:
    """AROUND `_alloc_page_size`."""
    cache, ends = batch.tree_cache, batch.seq_lens_cpu.tolist()
    size, table = cache.page_size, cache.page_table
    if batch.forward_mode.is_decode():
        starts, ends, tokens = ends, [end + 1 for end in ends], 0
    else:
        starts, tokens = batch.prefix_lens, batch.extend_num_tokens
    evict_from_tree_cache(cache, tokens + len(ends) * size)
    cache.token_to_kv_pool_allocator.expect(
        [
            Growth(start, end, _page(table, req, start) if start % size else None)
            for req, start, end in zip(batch.reqs, starts, ends, strict=True)
        ]
    )
    return 1


def _page(table: PageTable, req: Any, start: int) -> int:
    """The page that token `start` lies in: the tree has whole ones only, so it is the last own."""
    own = table.get(req.req_pool_idx)
    assert own, f"request {req.rid} goes on at token {start} inside a page, and owns none"
    return own[-1]


HOOKS = (
    Hook(
        target="sglang.srt.mem_cache.allocation._alloc_page_size",
        kind="around",
        function=alloc_page_size,
        parameters=("batch",),
        reason="ids are made on the host, without a look at the device",
    ),
)
