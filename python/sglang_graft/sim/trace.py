"""A workload cut into pages: who shares which page of KV with whom."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from sglang_graft.cache.runs import TOKEN_BYTES, token_bytes
from sglang_graft.sim.sizes import Sizes
from sglang_graft.sim.workloads import Workload

Blocks = np.ndarray[tuple[int], np.dtype[np.int64]]
"""Ids of pages `[pages]`, each one once."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request needs.

    tokens: prompt and output.   usable: prompt tokens that a cache may supply, in whole pages; the
    last token is always computed, for its logits.   blocks: ids of all whole pages of prompt and
    output; equal ids are equal KV.   pages: all pages while it runs.
    """

    adapter: int
    prompt: int
    total: int
    usable: int
    blocks: Blocks
    pages: int


@dataclass(slots=True)
class Trace:
    """A workload with its sizes; building it names every page of KV."""

    workload: Workload
    sizes: Sizes
    demands: list[Demand] = field(default_factory=list)
    blocks: int = 0
    """Distinct pages of KV."""

    def __post_init__(self) -> None:
        ids: dict[tuple[int, bytes], int] = {}
        size = self.sizes.page_tokens
        for request in self.workload.requests:
            tokens = request.tokens()
            prompt = request.prompt_tokens
            self.demands.append(
                Demand(
                    adapter=request.adapter,
                    prompt=prompt,
                    total=len(tokens),
                    usable=(prompt - 1) // size * size,
                    blocks=_blocks(ids, request.adapter, tokens, size),
                    pages=self.sizes.pages_for(len(tokens)),
                )
            )
        self.blocks = len(ids)

    def weight_pages(self, adapter: int) -> int:
        """Pages of an adapter's weights."""
        return self.sizes.adapter_pages(self.workload.adapters[adapter].rank)


def _blocks(
    ids: dict[tuple[int, bytes], int], adapter: int, tokens: array[int], page_tokens: int
) -> Blocks:
    """An id for each whole page, by its tokens and all before them; new ones enter `ids`."""
    data, size = token_bytes(tokens), page_tokens * TOKEN_BYTES
    names = []
    block = -1 - adapter  # no page has a negative id
    for start in range(0, len(data) // size * size, size):
        block = ids.setdefault((block, data[start : start + size]), len(ids))
        names.append(block)
    return np.array(names, dtype=np.int64)
