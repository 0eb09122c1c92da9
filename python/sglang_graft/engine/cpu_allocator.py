"""The allocator of a server on a plain CPU where Graft is off: SGLang's own, token by token.

Seam (0.5.17): `SRTPlatform.get_paged_allocator_cls`. Reason: SGLang gives every out-of-tree
platform's allocator a page size, and its paged allocator needs Triton.
"""

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator


class CpuTokenAllocator(TokenToKVPoolAllocator):
    """SGLang's allocator of single tokens, built as its paged one is."""

    def __init__(
        self,
        size: int,
        *,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: Any,
        need_sort: bool,
    ) -> None:
        if page_size != 1:
            raise ValueError(
                f"--page-size: wanted 1 on a CPU without Graft, got {page_size}; leave it out, or"
                " start with --enable-graft"
            )
        super().__init__(size, dtype, device, kvcache, need_sort)
