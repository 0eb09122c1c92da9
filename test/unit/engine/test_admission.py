"""What enters the waiting queue can be admitted once nothing runs, and preemption loses nobody."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from sglang_graft.cache import AdapterNode
from sglang_graft.engine.admission import add_one_req, fit_into_pool, preempt_to_schedule

PAGE = 16
POOL_PAGES = 20


def scheduler(weight_pages: int, pinned: int = 0) -> Any:
    """A scheduler whose adapter "a" takes `weight_pages`, as far as admission looks at it.

    Another adapter pins `pinned` pages.
    """
    nodes = {None: AdapterNode(1, None, 0), "a": AdapterNode(2, "weights", weight_pages)}
    pins = SimpleNamespace(pages=lambda without: pinned)
    cache = SimpleNamespace(
        residency=SimpleNamespace(node=nodes.get, pins=pins), asking=lambda req: nullcontext()
    )
    return SimpleNamespace(tree_cache=cache, page_size=PAGE, max_total_num_tokens=POOL_PAGES * PAGE)


class Request:
    """The parts of SGLang's request that admission reads and writes."""

    def __init__(self, prompt: int, new: int, adapter: str | None) -> None:
        self.origin_input_ids = [7] * prompt
        self.output_ids: list[int] = []
        self.prefix_indices: list[int] = []
        self.full_untruncated_fill_ids: list[int] = []  # empty until the first match
        self.lora_id = adapter
        self.to_finish: str | None = None
        self.sampling_params = SimpleNamespace(max_new_tokens=new, min_new_tokens=0)

    def set_finish_with_abort(self, message: str) -> None:
        self.origin_input_ids, self.to_finish = [0], message


def tokens_wanted(req: Any, page_size: int) -> int:
    """Tokens that SGLang's admission asks for: uncached prompt, new tokens, a page to round."""
    new = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
    prompt = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
    return int(prompt) + min(new, CLIP_MAX_NEW_TOKENS) + page_size


def is_admissible(request: Request, weight_pages: int, pinned: int = 0) -> bool:
    """Whether SGLang's budget lets it run in a pool that is empty but for pins."""
    weights = weight_pages * PAGE if request.lora_id else 0
    request.full_untruncated_fill_ids = request.origin_input_ids + request.output_ids
    return tokens_wanted(request, PAGE) + weights < (POOL_PAGES - pinned) * PAGE


@pytest.mark.parametrize("adapter", [None, "a"])
@pytest.mark.parametrize("weight_pages", [1, 9, POOL_PAGES - 2, POOL_PAGES - 1])
@pytest.mark.parametrize("new", [0, 1, 5, 10_000])
@pytest.mark.parametrize("pinned", [0, 6])
def test_every_queued_request_is_admissible(
    adapter: str | None, weight_pages: int, new: int, pinned: int
) -> None:
    weight_pages = min(weight_pages, POOL_PAGES - pinned - 1)
    host = scheduler(weight_pages, pinned)
    for prompt in range(1, POOL_PAGES * PAGE + 5):
        request = Request(prompt, new, adapter)
        fit_into_pool(host, request)
        assert is_admissible(request, weight_pages, pinned), (prompt, vars(request.sampling_params))
        if request.to_finish is None and new:
            assert request.sampling_params.max_new_tokens >= 1, prompt


def test_a_request_that_failed_already_needs_no_adapter() -> None:
    host, request = scheduler(15), Request(1, 300, "a")
    request.to_finish = "logprob_start_len is out of range"
    fit_into_pool(host, request)
    assert request.lora_id is None
    assert is_admissible(request, 15)
    assert request.to_finish == "logprob_start_len is out of range"


def test_a_retracted_request_stays_as_it_is() -> None:
    host, request = scheduler(9), Request(40, 10_000, "a")
    fit_into_pool(host, request)
    new = request.sampling_params.max_new_tokens
    request.output_ids = [3] * new
    fit_into_pool(host, request, is_retracted=True)
    assert (request.lora_id, request.to_finish) == ("a", None)
    assert request.sampling_params.max_new_tokens == new


@pytest.mark.parametrize("matched", [False, True])
@pytest.mark.parametrize(("locks", "pages"), [(0, 1 + 9), (1, 1)])
def test_preemption_counts_all_that_admission_asks_for(
    locks: int, pages: int, matched: bool
) -> None:
    adder = scheduler(9)
    adder.tree_cache.residency.node("a").lock = locks
    adder.rem_total_token_offset = 100
    request = Request(40, 5, "a")
    if matched:
        request.full_untruncated_fill_ids, request.prefix_indices = [7] * 40, [5] * 32
    seen: list[int] = []

    def original(self: Any, req: Any, _: Any) -> bool:
        counted = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        seen.append(self.rem_total_token_offset - 100 + counted)
        self.rem_total_token_offset -= 30  # a preempted request's reserve
        return True

    assert preempt_to_schedule(original, adder, request, None)
    assert seen == [40 + pages * PAGE + 1]
    assert adder.rem_total_token_offset == 70


class Adder:
    """PrefillAdder with room for `room` requests; counts what the tree and the adapters hear."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.can_run_list: list[Any] = []
        self.used: list[Any] = []
        self.hits: list[Any] = []
        self.observed: list[str] = []
        self.counted: list[str] = []
        self.tree_cache = SimpleNamespace(
            residency=SimpleNamespace(is_ready=lambda i: True, count_hit=self.hits.append),
            tree=SimpleNamespace(use=self.used.append),
            tiers=SimpleNamespace(prefetch=SimpleNamespace(came_warm=lambda rid: rid == "warm")),
            asking=lambda req: nullcontext(),
            observed=SimpleNamespace(admitted=lambda rid, has_adapter: self.observed.append(rid)),
            tenancy=SimpleNamespace(admitted=lambda req: self.counted.append(req.rid)),
        )

    def add(self, rid: str, *, retracted: bool = False, to_finish: object = None) -> None:
        req = SimpleNamespace(
            rid=rid, lora_id="a", last_node=rid, retracted_stain=retracted, to_finish=to_finish
        )
        add_one_req(self.take, self, req, has_chunked_req=False, truncation_align_size=None)

    def take(self, _: Any, req: Any, **rest: Any) -> None:
        if self.room > len(self.can_run_list):
            self.can_run_list.append(req)


def test_the_policy_hears_once_of_each_admitted_request() -> None:
    adder = Adder(room=4)
    adder.add("cold")
    adder.add("warm")
    adder.add("again", retracted=True)
    adder.add("failed", to_finish="an error")
    adder.add("no room")
    assert adder.used == ["cold", "warm"]
    assert adder.hits == ["a"]
    # Waiting times and tenants' pages are those of each admission.
    assert adder.observed == adder.counted == ["cold", "warm", "again", "failed"]
