"""Admission: a request runs only when its adapter has pages, and its pages fit beside it.

Targets (0.5.17):
- `Scheduler._can_schedule_lora_req`: ends requests whose adapter was unloaded meanwhile or cannot
  be read, lets no request pass one that waits for a slot (see `turns`), and passes over those whose
  bytes are not on the device yet (see `tiers/prefetch`);
- `PrefillAdder.add_one_req`: nothing runs without its adapter, whatever happened in between;
- `PrefillAdder.preempt_to_schedule`: the adapter's pages count in what preemption has to free;
- `Scheduler._add_request_to_queue`: a request that fits into the pool less its adapter's pages at
  no time would wait for ever, and all others behind it.

A request whose adapter is on its way is passed over in a bounded number of passes. One whose KV
does not fit blocks those behind it: first come, first served, and no adapter starves.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_graft.engine import turns
from sglang_graft.engine.hooks import Hook
from sglang_graft.engine.prefix_cache import GraftPrefixCache
from sglang_graft.tiers import Residency


def can_schedule(
    original: Callable[..., bool], self: Any, req: Any, running_loras: set[str | None]
) -> bool:
    """AROUND `_can_schedule_lora_req`."""
    if not self.tree_cache.residency.is_known(req.lora_id):
        message = f"LoRA adapter {req.lora_id} was unloaded before this request could start"
        _end(req, message)
    if not self.tree_cache.tenancy.may_start(req):
        return False  # it keeps nobody else waiting
    if not req.to_finish and (failure := self.tree_cache.waiting.failure(req)) is not None:
        _end(req, failure)
    if not turns.in_turn(original, self, req, running_loras):
        return False
    if req.to_finish or self.tree_cache.waiting.may_start(req):
        return True
    self.tree_cache.observed.held_back(req.rid)
    return False


def _end(req: Any, message: str) -> None:
    req.set_finish_with_abort(message)
    _forget_adapter(req)


def _forget_adapter(req: Any) -> None:
    """For a request that ends unanswered: the one token left of it needs no adapter."""
    req.lora_id = None


def add_one_req(original: Callable[..., Any], self: Any, req: Any, **rest: Any) -> Any:
    """AROUND `PrefillAdder.add_one_req`; SGLang calls it with keywords after `req`."""
    cache: GraftPrefixCache = self.tree_cache
    residency: Residency = cache.residency
    if not residency.is_ready(req.lora_id):
        return AddReqResult.NO_TOKEN
    before = len(self.can_run_list)
    with cache.asking(req):
        result = original(self, req, **rest)
    if len(self.can_run_list) > before:
        cache.observed.admitted(req.rid, has_adapter=req.lora_id is not None)
        cache.tenancy.admitted(req)
        _admitted(cache, req)
    return result


def _admitted(cache: GraftPrefixCache, req: Any) -> None:
    """Once for each request: one that comes back after it was retracted, or fails, is no demand."""
    if req.retracted_stain or req.to_finish:
        return
    cache.tree.use(req.last_node)
    if cache.tiers.prefetch.came_warm(req.rid):
        cache.residency.count_hit(req.lora_id)


def fit_into_pool(self: Any, req: Any, is_retracted: bool = False) -> None:
    """BEFORE `_add_request_to_queue`: leave room for the adapter, or refuse the request.

    What passes here is admitted by `PrefillAdder` as soon as nothing else runs.
    """
    cache: GraftPrefixCache = self.tree_cache
    if req.to_finish and not req.output_ids:
        _forget_adapter(req)
    node = cache.residency.node(req.lora_id)
    if node is None:
        return
    size, sampling = self.page_size, req.sampling_params
    pinned = cache.residency.pins.pages(without=node)
    prompt, weights = len(req.origin_input_ids), (node.weight_pages + pinned) * size
    # The adder keeps a page for rounding, and its comparison is strict.
    room = self.max_total_num_tokens - weights - -(-prompt // size) * size - size - 1
    if room < min(sampling.max_new_tokens, 1):
        req.set_finish_with_abort(
            f"The request does not fit into the pool: {prompt} tokens of prompt and"
            f" {weights} tokens' worth of weights of its own and of pinned adapters, of"
            f" {self.max_total_num_tokens} in all. Use a shorter prompt or a larger pool."
        )
        _forget_adapter(req)
        room = 1
    sampling.max_new_tokens = min(sampling.max_new_tokens, room)
    sampling.min_new_tokens = min(sampling.min_new_tokens, sampling.max_new_tokens)


def preempt_to_schedule(
    original: Callable[..., bool], self: Any, req: Any, server_args: Any
) -> bool:
    """AROUND `PrefillAdder.preempt_to_schedule`: preempt only what makes the request fit.

    SGLang forgets the requests that it preempted when the one that they made room for is not
    admitted after all, and it does not count the prompt of a request that it never matched. So all
    that admission will ask for counts here: the whole prompt, whose cached part is locked then, the
    adapter unless a request holds it, and a page to round.
    """
    cache: GraftPrefixCache = self.tree_cache
    node = cache.residency.node(req.lora_id)
    assert node is not None, f"adapter {req.lora_id} is not registered"
    tokens = len(req.origin_input_ids) + len(req.output_ids)
    counted = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
    pages = 1 if node.lock else 1 + node.weight_pages
    extra = tokens - counted + pages * self.page_size + 1
    self.rem_total_token_offset += extra
    try:
        with cache.asking(req):
            return original(self, req, server_args)
    finally:
        self.rem_total_token_offset -= extra


HOOKS = (
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler._can_schedule_lora_req",
        kind="around",
        function=can_schedule,
        parameters=("self", "req", "running_loras"),
        reason="never answer for an adapter that is gone",
    ),
    Hook(
        target="sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        kind="around",
        function=add_one_req,
        parameters=("self", "req", "has_chunked_req", "truncation_align_size"),
        reason="nothing runs without its adapter",
    ),
    Hook(
        target="sglang.srt.managers.schedule_policy.PrefillAdder.preempt_to_schedule",
        kind="around",
        function=preempt_to_schedule,
        parameters=("self", "req", "server_args"),
        reason="no running request is preempted, and lost, for one that does not fit",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
        kind="before",
        function=fit_into_pool,
        parameters=("self", "req", "is_retracted"),
        reason="a request must fit into the pool beside its adapter",
    ),
)
