"""Admission: a request runs only when its adapter has pages, and its pages fit beside it.

Targets (0.5.17):
- `Scheduler._can_schedule_lora_req`: ends requests whose adapter was unloaded meanwhile;
- `PrefillAdder.add_one_req`: promotes the adapter within the budget that the adder has left, so
  that what was promised to running requests and to this pass's earlier ones stays untouched;
- `Scheduler.init_req_max_new_tokens`: SGLang bounds a request by the pool; ours is the pool less
  the adapter's pages, otherwise such a request would wait for ever.

A request whose adapter does not fit now blocks those behind it, as one whose KV does not fit
does: first come, first served, so no adapter starves.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult

from sglang_graft.engine.hooks import Hook
from sglang_graft.engine.prefix_cache import GraftPrefixCache
from sglang_graft.tiers import Residency


def can_schedule(
    original: Callable[..., bool], self: Any, req: Any, running_loras: set[str | None]
) -> bool:
    """AROUND `_can_schedule_lora_req`."""
    if not self.tree_cache.residency.is_known(req.lora_id):
        message = f"LoRA adapter {req.lora_id} was unloaded before this request could start"
        req.set_finish_with_abort(message)
        # What is left of the request is one token that nobody sees; it needs no adapter.
        req.lora_id = None
    return original(self, req, running_loras)


def tokens_wanted(req: Any, page_size: int) -> int:
    """Tokens that SGLang's admission asks for: the uncached prompt, new tokens, a page to round."""
    new = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
    prompt = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
    return int(prompt) + min(new, CLIP_MAX_NEW_TOKENS) + page_size


def add_one_req(original: Callable[..., Any], self: Any, req: Any, **rest: Any) -> Any:
    """AROUND `PrefillAdder.add_one_req`; SGLang calls it with keywords after `req`."""
    cache: GraftPrefixCache = self.tree_cache
    residency: Residency = cache.residency
    missing = residency.missing_pages(req.lora_id)
    if missing:
        wanted = tokens_wanted(req, self.page_size) + missing * self.page_size
        if wanted >= self.rem_total_tokens or not residency.promote(req.lora_id):
            return AddReqResult.NO_TOKEN
    before = len(self.can_run_list)
    result = original(self, req, **rest)
    if len(self.can_run_list) > before and not missing:
        residency.count_hit(req.lora_id)
    return result


def limit_new_tokens(result: None, self: Any, req: Any) -> None:
    """AFTER `init_req_max_new_tokens`: leave room for the adapter, or refuse the request."""
    cache: GraftPrefixCache = self.tree_cache
    node = cache.residency.node(req.lora_id)
    if node is None or not node.weight_pages:
        return
    size = self.page_size
    prompt = -(-len(req.origin_input_ids) // size) * size
    room = self.max_total_num_tokens - node.weight_pages * size - prompt - size - 1
    if room < 1 and not req.to_finish:
        req.set_finish_with_abort(
            f"The request does not fit into the pool: {prompt} tokens of prompt and"
            f" {node.weight_pages * size} tokens' worth of adapter weights, of"
            f" {self.max_total_num_tokens} in all. Use a shorter prompt or a larger pool."
        )
        room = 1
    req.sampling_params.max_new_tokens = min(req.sampling_params.max_new_tokens, max(room, 1))
    req.sampling_params.min_new_tokens = min(
        req.sampling_params.min_new_tokens, req.sampling_params.max_new_tokens
    )


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
        reason="promote the adapter within the admission budget",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens",
        kind="after",
        function=limit_new_tokens,
        parameters=("self", "req"),
        reason="a request must fit into the pool beside its adapter",
    ),
)
