"""Whose turn it is, what a cap holds back, and floors that a pool can hold."""

import itertools
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_graft.cache import Lru, Reason, UnifiedTree
from sglang_graft.engine import tenants
from sglang_graft.engine.precedence import PATIENCE
from sglang_graft.engine.tenancy import Tenancy
from sglang_graft.engine.tenants import fit_into_limits, kept_last
from sglang_graft.pool import Owner, PageLedger
from sglang_graft.tenants import carrier

PAGE = 16
NUMBERS = itertools.count()


class Cache:
    """The parts of the tree cache that tenancy looks at; adapter "x" has 10 pages."""

    page_size = PAGE

    def __init__(self, pages: int = 100, pinned: int = 0) -> None:
        self.tree = UnifiedTree(PageLedger(pages + 1), page_tokens=PAGE, policy=Lru())
        nodes = {None: self.tree.base, "x": self.tree.add_adapter("x", 10)}
        pins = SimpleNamespace(pages=lambda without=None: pinned)
        self.residency = SimpleNamespace(node=nodes.get, pins=pins)
        self.tenancy = Tenancy(self, enabled=True)  # type: ignore[arg-type]
        self.incoming: Any = {}


def request(who: str | None, prompt: int = 10, new: int = 6, adapter: str | None = None) -> Any:
    extra = carrier.encode(who, "mine", shared=False) + (adapter or "")
    req = SimpleNamespace(
        rid=f"r{next(NUMBERS)}",
        extra_key=extra,
        lora_id=adapter,
        origin_input_ids=[7] * prompt,
        to_finish=None,
        sampling_params=SimpleNamespace(max_new_tokens=new, min_new_tokens=0),
    )

    def finish(message: str) -> None:
        req.to_finish = message

    req.set_finish_with_abort = finish
    return req


def limits(floor: Any = 0, cap: Any = None, priority: int = 0) -> dict[str, Any]:
    return {"page_floor": floor, "page_cap": cap, "priority": priority}


def test_a_request_says_whose_it_is() -> None:
    tenancy = Cache().tenancy
    req = request("a", adapter="x")
    assert tenancy.share(req).name == "a"
    assert tenancy.read(req) == ("a", False, "pa\x01mine")
    assert tenancy.share(request(None)) is tenancy.shares.common
    assert tenancy.kv_share(req) is tenancy.shares.get("a")


def test_without_a_file_a_clients_text_is_only_a_salt() -> None:
    cache = Cache()
    tenancy = Tenancy(cache, enabled=False)  # type: ignore[arg-type]
    req = request("a")
    assert tenancy.share(req) is tenancy.shares.common
    assert tenancy.read(req) == ("", False, req.extra_key)


def order(tenancy: Tenancy, *names: str, running: dict[str, int] | None = None) -> str:
    """The order of requests whose tenants are the first letters of their names."""
    queue = [SimpleNamespace(**vars(request(name[0])), name=name) for name in names]
    counts = {tenancy.shares.get(name): n for name, n in (running or {}).items()}
    tenancy.order(queue, counts)
    return " ".join(req.name for req in queue)


def test_tenants_take_turns() -> None:
    tenancy = Cache().tenancy
    assert order(tenancy, "a1", "a2", "a3", "b1", "b2") == "a1 b1 a2 b2 a3"
    assert order(tenancy, "a1", "a2", "b1", running={"a": 2}) == "b1 a1 a2"
    tenancy.set_limits({"a": limits(priority=1), "b": limits()})
    assert order(tenancy, "b1", "a1", "b2", "a2") == "a1 a2 b1 b2"


def test_below_its_floor_a_tenant_goes_first() -> None:
    tenancy = Cache().tenancy
    tenancy.set_limits({"b": limits(floor=5)})
    assert order(tenancy, "a1", "b1", "b2", "a2", running={"b": 3}) == "b1 b2 a1 a2"
    tenancy.shares.get("b").running = 6
    assert order(tenancy, "a1", "b1", "a2", running={"b": 3}) == "a1 a2 b1"


@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(0, 3))
def test_an_order_is_total_and_keeps_each_tenants_own(names: list[str], running: int) -> None:
    tenancy = Cache().tenancy
    named = [f"{name}{place}" for place, name in enumerate(names)]
    once = order(tenancy, *named, running={"a": running})
    assert sorted(once.split()) == sorted(named)
    assert order(tenancy, *once.split(), running={"a": running}) == once
    for tenant in "abc":
        own = [name for name in once.split() if name[0] == tenant]
        assert own == [name for name in named if name[0] == tenant]


def test_a_cap_counts_what_runs_and_each_adapter_once() -> None:
    tenancy = Cache().tenancy
    tenancy.set_limits({"a": limits(cap=18)})
    first, second = (request("a", prompt=10, new=6, adapter="x") for _ in range(2))
    assert tenancy.may_start(first)  # 1 page, 2 to round, 10 of weights
    tenancy.begin_pass([first], [])
    assert tenancy.may_start(second)
    tenancy.admitted(second)
    assert not tenancy.may_start(request("a"))
    assert tenancy.may_start(request("b"))
    tenancy.begin_pass([], [])
    assert tenancy.may_start(request("a"))


def test_nothing_is_loaded_for_who_cannot_start_below_its_cap() -> None:
    tenancy = Cache().tenancy
    tenancy.set_limits({"a": limits(cap=19)})
    one = request("a", adapter="x")  # 13 pages, the next with the same adapter 3
    queue = [one, request("a", adapter="x"), request("b"), request("a", prompt=100), request("a")]
    assert tenancy.choose(queue) == [*queue[:3], queue[4]]
    assert [tenancy.may_start(req) for req in queue] == [True, True, True, False, True]
    tenancy.begin_pass([one], [])
    assert tenancy.choose(queue[1:]) == [queue[1], queue[2], queue[4]]
    assert all(tenancy.may_start(req) for req in tenancy.choose(queue[1:]))
    tenancy.set_limits({})
    assert tenancy.choose(queue) == queue


def test_who_was_not_chosen_takes_no_room_from_those_whose_bytes_are_coming() -> None:
    tenancy = Cache().tenancy
    tenancy.set_limits({"a": limits(cap=14)})
    first, second = request("a", adapter="x"), request("a")
    tenancy.begin_pass([], [])
    assert tenancy.choose([first, second]) == [first]
    # The adapter of the first is on its way, so this pass admits nobody before the second.
    assert not tenancy.may_start(second)


def test_a_request_within_its_floor_is_admitted_alone_but_not_for_ever() -> None:
    tenancy = Cache().tenancy
    tenancy.set_limits({"b": limits(floor=20), "c": limits(floor=1)})
    tenancy.shares.get("c").running = 2
    queue = [request(name) for name in "bbac"]
    seen = []
    for _ in range(2 * (PATIENCE + 1)):
        tenancy.begin_pass([], [])
        tenancy.choose(queue)
        found = []
        for req in queue:
            found.append(tenancy.may_start(req))
            if found[-1]:
                tenancy.admitted(req)
        seen.append(found)
    alone = [True, True, False, False]
    assert seen == ([alone] * PATIENCE + [[True] * 4]) * 2
    tenancy.begin_pass([], [])
    tenancy.choose(queue[2:])
    assert all(tenancy.may_start(req) for req in queue[2:]), "nobody who goes first is there"


def test_while_it_waits_nothing_is_begun_for_others_that_come() -> None:
    tenancy = Cache().tenancy
    tenancy.set_limits({"b": limits(floor=20)})
    old, first, new = request("a"), request("b"), request("a")
    tenancy.begin_pass([], [])
    assert tenancy.choose([old]) == [old]
    for _ in range(PATIENCE):
        tenancy.begin_pass([], [])
        assert tenancy.choose([first, old, new]) == [first, old]
        assert not tenancy.may_start(new)
        assert tenancy.may_start(old), "what was begun goes on"
    tenancy.begin_pass([], [])
    assert tenancy.choose([first, old, new]) == [first, old, new]


def test_what_is_only_cached_does_not_cost_a_tenant_its_turn() -> None:
    cache = Cache(pages=20)
    tenancy, tree = cache.tenancy, cache.tree
    b = tenancy.shares.get("b")
    tenancy.set_limits({"b": limits(floor=5)})
    pages = tree.ledger.take(9, Owner.KV_RUNNING)
    node = tree.insert(tree.base, array("q", range(9 * PAGE)), pages or [], start=0, share=b).node
    assert b.held == 9
    assert order(tenancy, "a1", "b1", running={"b": 3}) == "b1 a1"
    tree.lock(node)
    assert order(tenancy, "a1", "b1", running={"b": 3}) == "a1 b1"
    tree.unlock(node)


def test_what_a_cap_takes_is_counted_as_that() -> None:
    cache = Cache(pages=20)
    a = cache.tenancy.shares.get("a")
    pages = cache.tree.ledger.take(9, Owner.KV_RUNNING)
    cache.tree.insert(cache.tree.base, array("q", range(9 * PAGE)), pages or [], start=0, share=a)
    cache.tenancy.set_limits({"a": limits(cap=7)})
    cache.tenancy.enforce_caps()
    assert a.held == 7
    assert cache.tree.departures.counts == {(Reason.CAP, False): [1, 2]}


def test_floors_that_leave_too_little_are_refused_with_the_figures() -> None:
    tenancy = Cache(pages=100, pinned=7).tenancy
    tenancy.set_limits({"a": limits(floor=0.5), "b": limits(floor=30)})
    assert [tenancy.shares.get(name).floor for name in "ab"] == [50, 30]
    with pytest.raises(ValueError, match="are 81 pages, wanted at most 80: the pool has 100"):
        tenancy.set_limits({"a": limits(floor=51), "b": limits(floor=30)})
    assert [tenancy.shares.get(name).floor for name in "ab"] == [50, 30]
    with pytest.raises(ValueError, match=r"tenant a: page_cap: wanted .* got 2 pages of 100"):
        tenancy.set_limits({"a": limits(cap=2)})
    with pytest.raises(ValueError, match=r"at least its page_floor \(40\)"):
        tenancy.set_limits({"a": limits(floor=40, cap=0.3)})
    tenancy.set_limits({})
    assert tenancy.shares.floors() == 0


@pytest.mark.parametrize(("who", "cap", "floor"), [("a", 30, 0), ("a", None, 40), ("a", 30, 75)])
def test_what_is_queued_fits_in_the_end(who: str, cap: int | None, floor: int) -> None:
    cache = Cache()
    cache.tenancy.set_limits({"a": limits(cap=cap), "b": limits(floor=floor)})
    scheduler = SimpleNamespace(tree_cache=cache, page_size=PAGE)
    room = cache.tenancy.room(request(who))
    assert room <= 100 - floor
    for prompt in range(1, 1700, 13):
        for new in (0, 1, 5, 10_000):
            req = request(who, prompt, new, "x")
            fit_into_limits(scheduler, req)
            if req.to_finish is None:
                wanted = -(-(prompt + req.sampling_params.max_new_tokens) // PAGE) + 2 + 10
                assert wanted <= room, (prompt, new)
                assert cache.tenancy.may_start(req)
                assert not new or req.sampling_params.max_new_tokens > 0
            else:
                assert prompt + min(new, 1) > (room - 14) * PAGE, "refused without need"
                assert f"page_cap {cap}" in req.to_finish


def test_who_is_below_its_floor_is_retracted_last() -> None:
    tenancy = Cache().tenancy
    tenancy.set_limits({"b": limits(floor=5)})
    reqs = [request(name) for name in "abab"]
    shares = [tenancy.share(req) for req in reqs]
    shares[1].running, shares[0].running = 5, 9
    assert kept_last([0, 1, 2, 3], reqs, None) == [1, 3, 0, 2]
    shares[1].running = 6
    assert kept_last([0, 1, 2, 3], reqs, None) == [0, 1, 2, 3]


def test_requests_older_than_a_floor_may_break_it() -> None:
    cache = Cache(pages=20)
    tenancy, tree = cache.tenancy, cache.tree
    b = tenancy.shares.get("b")
    pages = tree.ledger.take(15, Owner.KV_RUNNING)
    tree.insert(tree.base, array("q", range(15 * PAGE)), pages or [], start=0, share=b)
    tenancy.set_limits({"b": limits(floor=7)})
    tenancy.provide(13, {tenancy.shares.get("a"): 13})
    assert (tree.ledger.free, b.held, tenancy.floors_broken) == (13, 7, 0)
    tenancy.provide(14, {tenancy.shares.get("a"): 14})
    assert (tree.ledger.free, b.held, tenancy.floors_broken) == (14, 6, 1)


def test_the_operations() -> None:
    cache = Cache()
    scheduler = SimpleNamespace(tree_cache=cache)
    assert tenants.OPERATIONS["set_tenants"](scheduler, {"tenants": {"a": limits(floor=4)}}) == {}
    row = tenants.OPERATIONS["tenants"](scheduler, {})["tenants"]["a"]
    assert (row["floor"], row["cap"], row["held"]) == (4, None, 0)
