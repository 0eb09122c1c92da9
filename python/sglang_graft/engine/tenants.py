"""Where the scheduler asks `tenancy`, and what the HTTP process asks of it.

Targets (0.5.17):
- BEFORE `Scheduler._add_request_to_queue`: a request that fits below no cap, or not beside the
  floors of others, would wait for ever;
- AFTER `SchedulePolicy.calc_priority`: SGLang's order may let one tenant's flood go first;
- AROUND `PrefillAdder.add_chunked_req`: the next chunk of a prompt is its tenant's need;
- AFTER `ScheduleBatch._get_decode_retraction_order`: who is below its floor is retracted last;
- AROUND `ScheduleBatch.check_decode_mem`, BEFORE `allocation.alloc_for_extend`: pages are evicted
  for a batch, whose tenants may give up as many of their own as they get.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_graft.cache.shares import Share
from sglang_graft.engine.hooks import Hook
from sglang_graft.engine.prefix_cache import GraftPrefixCache
from sglang_graft.engine.tenancy import is_kept
from sglang_graft.tenants import read


def fit_into_limits(self: Any, req: Any, is_retracted: bool = False) -> None:
    """BEFORE `_add_request_to_queue`: as `admission.fit_into_pool`, for caps and floors."""
    cache: GraftPrefixCache = self.tree_cache
    node = cache.residency.node(req.lora_id)
    if not cache.tenancy.enabled or node is None or req.to_finish:
        return
    size, sampling = self.page_size, req.sampling_params
    prompt, pages = len(req.origin_input_ids), cache.tenancy.room(req)
    # Two pages to round, as `pinning.pages_wanted` and SGLang's admission count them.
    room = (pages - node.weight_pages - 2) * size - -(-prompt // size) * size - 1
    if room < min(sampling.max_new_tokens, 1):
        share = cache.tenancy.share(req)
        req.set_finish_with_abort(
            f"The request does not fit: {prompt} tokens of prompt and {node.weight_pages} pages of"
            f" weights, and of the pool's {cache.tree.ledger.total} pages {max(0, pages)} are"
            f" there for it (page_cap {share.cap}, floors of other tenants"
            f" {cache.tree.shares.floors(without=share)}, {size} tokens a page)."
        )
        req.lora_id = None
        room = 1
    sampling.max_new_tokens = min(sampling.max_new_tokens, room)
    sampling.min_new_tokens = min(sampling.min_new_tokens, sampling.max_new_tokens)


def fair_order(
    result: None, self: Any, waiting_queue: list[Any], running_batch: Any = None
) -> None:
    """AFTER `calc_priority`."""
    tenancy = getattr(self.tree_cache, "tenancy", None)
    if tenancy is None or not tenancy.enabled:
        return
    running = running_batch.reqs if running_batch is not None else ()
    tenancy.order(waiting_queue, Counter(map(tenancy.share, running)))


def add_chunked_req(original: Callable[..., Any], self: Any, req: Any) -> Any:
    """AROUND `add_chunked_req`."""
    with self.tree_cache.asking(req):
        return original(self, req)


def check_decode_mem(
    original: Callable[..., bool], self: Any, selected_indices: list[int] | None = None
) -> bool:
    """AROUND `check_decode_mem`: each request that begins a page gets one."""
    cache: GraftPrefixCache = self.tree_cache
    if not cache.tenancy.enabled:
        return original(self, selected_indices)
    chosen = self.reqs if selected_indices is None else [self.reqs[i] for i in selected_indices]
    begun = [req for req in chosen if req.kv_committed_len % cache.page_size == 0]
    cache.incoming = Counter(map(cache.tenancy.share, begun))
    cache.tenancy.enforce_caps(cache.incoming)
    if len(chosen) == 1:  # nobody is left to be retracted
        cache.tenancy.provide(len(begun), cache.incoming)
    try:
        return original(self, selected_indices)
    finally:
        cache.incoming = {}


def kept_last(result: list[int], reqs: list[Any], server_args: Any) -> list[int]:
    """AFTER `_get_decode_retraction_order`, which lists first who is retracted last."""
    return sorted(result, key=lambda place: not is_kept(reqs[place]))


def before_extend(batch: Any) -> None:
    """BEFORE `alloc_for_extend`; `page_table.after_extend` ends what begins here."""
    cache: GraftPrefixCache = batch.tree_cache
    if not cache.tenancy.enabled:
        return
    size, incoming = cache.page_size, Counter[Share]()
    for req, end in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
        pages = -(-end // size) - -(-len(req.prefix_indices) // size)
        incoming[cache.tenancy.share(req)] += pages
    cache.incoming = incoming
    cache.tenancy.enforce_caps(incoming)
    cache.tenancy.provide(sum(incoming.values()), incoming)


def set_from_file(cache: GraftPrefixCache, path: str) -> None:
    """The limits that the scheduler starts with. ValueError says what is wrong with the file."""
    tenants = read(Path(path))
    fields = {"page_floor", "page_cap", "priority"}
    cache.tenancy.set_limits({n: t.model_dump(include=fields) for n, t in tenants.items()})


def _set(scheduler: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    tenancy = scheduler.tree_cache.tenancy
    take = tenancy.check_limits if arguments.get("dry_run") else tenancy.set_limits
    take(arguments["tenants"])
    return {}


OPERATIONS = {
    "set_tenants": _set,
    "tenants": lambda scheduler, _: scheduler.tree_cache.tenancy.report(),
}

HOOKS = (
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
        kind="before",
        function=fit_into_limits,
        parameters=("self", "req", "is_retracted"),
        reason="a request must fit below its tenant's cap and beside other tenants' floors",
    ),
    Hook(
        target="sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority",
        kind="after",
        function=fair_order,
        parameters=("self", "waiting_queue", "running_batch"),
        reason="tenants take turns",
    ),
    Hook(
        target="sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
        kind="around",
        function=add_chunked_req,
        parameters=("self", "req"),
        reason="a chunk takes no page that a floor keeps",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
        kind="around",
        function=check_decode_mem,
        parameters=("self", "selected_indices"),
        reason="a running request may replace its own tenant's cached KV",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.ScheduleBatch._get_decode_retraction_order",
        kind="after",
        function=kept_last,
        parameters=("reqs", "server_args"),
        reason="nobody is retracted below its floor for another tenant",
    ),
    Hook(
        target="sglang.srt.mem_cache.allocation.alloc_for_extend",
        kind="before",
        function=before_extend,
        parameters=("batch",),
        reason="a prefill may replace its own tenant's cached KV",
    ),
)
