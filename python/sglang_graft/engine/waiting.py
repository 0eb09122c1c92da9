"""The waiting queue as the tiers see it, and their turn in each scheduling pass.

Target (0.5.17): BEFORE `Scheduler._get_new_batch_prefill_raw`, which every turn of the scheduler's
loop calls, also when nothing waits. Reason: copies and disk reads are polled there, loads for
waiting requests begin there, and `admission` asks afterwards which requests can start.

SGLang sets `batch_is_full` when a request finds no tokens and clears it when a running one ends. If
nothing runs, only this pass can clear it.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from sglang_graft.engine import prefill_times
from sglang_graft.engine.give_way import give_way
from sglang_graft.engine.hooks import Hook
from sglang_graft.engine.tiers import note_forward_stream
from sglang_graft.tiers import Wish

if TYPE_CHECKING:
    from sglang_graft.engine.prefix_cache import GraftPrefixCache


class WaitingRequests:
    """A `Wish` for each request in the queue, kept from pass to pass."""

    def __init__(self, cache: GraftPrefixCache) -> None:
        self.cache = cache
        self._wishes: dict[str, tuple[int, Wish]] = {}

    def step(self, queue: list[Any]) -> None:
        """One pass of the tiers over the queue."""
        known, self._wishes = self._wishes, {}
        for req in queue:
            if req.rid in known:
                self._wishes[req.rid] = known[req.rid]
        self.cache.observed.keep(self._wishes)
        self.cache.tiers.step([self.wish(req) for req in queue if not req.to_finish])

    def failure(self, req: Any) -> str | None:
        """Why the adapter of this request could not be read, if that is so."""
        return self.cache.tiers.prefetch.failure(self._of_this_pass(req))

    def may_start(self, req: Any) -> bool:
        """Whether the bytes of this request are on the device and it is not held back."""
        return self.cache.tiers.prefetch.may_start(self._of_this_pass(req))

    def _of_this_pass(self, req: Any) -> Wish:
        """What `step` made of the request; it does not change while the pass goes on."""
        kept = self._wishes.get(req.rid)
        return self.wish(req) if kept is None else kept[1]

    def wish(self, req: Any) -> Wish:
        """The wish of a request; a new one when it was retracted with more tokens than before."""
        length = len(req.origin_input_ids) + len(req.output_ids)
        node, salt = self.cache.namespace(req)
        kept = self._wishes.get(req.rid)
        if kept is not None and kept[0] == length and kept[1].node is node:
            return kept[1]
        tokens = array("q")
        if self.cache.keep:
            # The last token is always computed, so no cached page that holds it helps.
            tokens = array("q", (req.origin_input_ids + req.output_ids)[: length - 1])
        wish = Wish(req.rid, node, tokens, salt, self.cache.tenancy.share(req))
        self._wishes[req.rid] = (length, wish)
        return wish


def reserved_pages(scheduler: Any, running_batch: Any) -> int:
    """Pages promised to what runs: one each, and the next chunk of a long prompt."""
    pages = len(running_batch.reqs)
    if scheduler.chunked_req is not None:
        pages += -(-(scheduler.chunked_prefill_size or 0) // scheduler.page_size) + 1
    return pages


def running(scheduler: Any, running_batch: Any) -> list[Any]:
    """Requests that have been admitted and have not ended."""
    found = {id(req): req for req in running_batch.reqs}
    for batch in (scheduler.running_batch, scheduler.last_batch):
        found |= {id(req): req for req in (batch.reqs if batch is not None else ())}
    if scheduler.chunked_req is not None:
        found[id(scheduler.chunked_req)] = scheduler.chunked_req
    return [req for req in found.values() if not req.finished()]


def begin_pass(self: Any, prefill_delayer_single_pass: Any, running_batch: Any) -> None:
    """BEFORE `_get_new_batch_prefill_raw`."""
    cache: GraftPrefixCache = self.tree_cache
    idle = running_batch.is_empty()
    if idle:
        running_batch.batch_is_full = False
    cache.observed.begin_pass(busy=bool(self.waiting_queue) or not idle)
    note_forward_stream(self)
    prefill_times.collect()
    cache.pool.ledger.reserve = reserved_pages(self, running_batch)
    if cache.tenancy.enabled:
        cache.tenancy.begin_pass(running(self, running_batch), self.waiting_queue)
    cache.waiting.step(cache.tenancy.choose(self.waiting_queue))
    if cache.tiers.is_reading:
        give_way(self)
    cache.check_now()


HOOKS = (
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        kind="before",
        function=begin_pass,
        parameters=("self", "prefill_delayer_single_pass", "running_batch"),
        reason="poll copies and reads, begin loads for waiting requests",
    ),
)
