"""When an adapter may be pinned while requests run.

A pin takes pages for good. SGLang retracts requests when running ones need more pages than there
are, so that each of them fits into the pool alone at last, and it computes the next chunk of a
prompt in any case. Both must stay true beside the pin, or the request would wait for ever, or the
scheduler would end for want of memory.
"""

from collections.abc import Iterator
from typing import Any

from sglang_graft.cache import AdapterNode
from sglang_graft.engine.start_adapters import ReadAdapter
from sglang_graft.tiers import Residency


def requests(scheduler: Any) -> Iterator[Any]:
    """Every unfinished request that was admitted to the waiting queue; some come twice."""
    yield from scheduler.waiting_queue
    for batch in (scheduler.running_batch, scheduler.last_batch):
        if batch is not None:
            yield from (req for req in batch.reqs if not req.finished())
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req


def pages_wanted(req: Any, page_tokens: int) -> int:
    """Pages of KV that a request may take at most: its prompt, its answer, two to round."""
    tokens = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
    return -(-int(tokens) // page_tokens) + 2


def check(scheduler: Any, residency: Residency, ref: Any, read: ReadAdapter) -> None:
    """`check_pages` of an adapter that was read, and is not registered yet."""
    node = residency.tree.adapter(read.adapter.identity)
    check_pages(scheduler, residency, ref.lora_name, node, len(read.image.pages))


def check_pages(
    scheduler: Any, residency: Residency, name: str, node: AdapterNode | None, weights: int
) -> None:
    """ValueError when pinning these weights would leave too little for a request that is here.

    `node` is theirs, if the tree knows them.
    """
    tree, size = residency.tree, scheduler.page_size
    pinned = weights + residency.pins.pages(without=node)
    for req in requests(scheduler):
        own = residency.node(req.lora_id)
        extra = 0 if own is None or own is node or residency.pins.count(own) else own.weight_pages
        wanted = pages_wanted(req, size) + extra
        if wanted + pinned > tree.ledger.total:
            raise ValueError(
                f"adapter {name}: pinned adapters would hold {pinned} pages of"
                f" {tree.ledger.total}, and a request that is under way may need {wanted}; try"
                ' again when it has ended, or load it with "pinned": false'
            )
    chunked = scheduler.chunked_req
    if chunked is not None and (node is None or not residency.pins.count(node)):
        rest = len(chunked.origin_input_ids) - len(chunked.prefix_indices)
        reserve = -(-rest // size) + 1
        if weights + reserve > tree.ledger.free + tree.evictable:
            raise ValueError(
                f"adapter {name}: no room to pin {weights} pages now, a long prompt still needs"
                f' {reserve}; try again later, or load it with "pinned": false'
            )
