"""One budget of bytes for adapters and KV, cut as each peer cuts it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sglang_graft.bench.peers import Peer
from sglang_graft.bench.shape import ModelShape
from sglang_graft.sim.workloads import Workload


@dataclass(frozen=True, slots=True)
class Split:
    """How a peer uses the budget. `problem`: why it cannot serve the workload at this budget.

    adapter_bytes: a part of its own (stock's slots, each padded to the largest rank); Graft has
    none, its `kv_tokens` are the whole pool, which adapters share.
    """

    budget_bytes: int
    adapter_bytes: int
    kv_tokens: int
    kv_bytes: int
    arithmetic: str
    problem: str = ""

    def report(self) -> dict[str, Any]:
        """As plain numbers."""
        return asdict(self)


def largest_request(workload: Workload) -> int:
    """Tokens of prompt and output of the longest request."""
    return max(r.prompt_tokens + r.output.length for r in workload.requests)


def split(peer: Peer, budget_gb: float, shape: ModelShape, workload: Workload) -> Split:
    """Cut `budget_gb` (1e9 bytes) for `peer`."""
    budget = int(budget_gb * 1e9)
    token = shape.kv_bytes_per_token
    rank = max(adapter.rank for adapter in workload.adapters)
    weights = rank * shape.adapter_bytes_per_rank
    needed = largest_request(workload)
    if peer.engine == "graft":
        layout = shape.layout
        pages = budget // layout.page_bytes
        tokens = pages * layout.page_tokens
        needed = (
            layout.pages_for(needed) + layout.pages_for_bytes(weights) + 1
        ) * layout.page_tokens
        text = (
            f"{budget} B / {layout.page_bytes} B a page of {layout.page_tokens} tokens"
            f" = {pages} pages; --max-total-tokens {tokens}; adapters and KV share them"
        )
        found = Split(budget, 0, tokens, pages * layout.page_bytes, text)
    else:
        slots = peer.slots * weights
        size = shape.page_tokens
        tokens = max(budget - slots, 0) // token // size * size  # as SGLang rounds it
        text = (
            f"{budget} B - {peer.slots} slots x {weights} B (rank {rank}, all linears) = "
            f"{budget - slots} B / {token} B a token, in pages of {size};"
            f" --max-total-tokens {tokens}"
        )
        found = Split(budget, slots, tokens, tokens * token, text)
    if found.kv_tokens < needed:
        problem = (
            f"the longest request needs room for {needed} tokens, the budget leaves "
            f"{found.kv_tokens}"
        )
        found = Split(**{**asdict(found), "problem": problem})
    return found
