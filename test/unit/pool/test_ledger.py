"""The page ledger: order, owners, reserve, and its own check of itself."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_graft.pool import Owner, PageLedger

HOLDERS = [Owner.ADAPTER, Owner.KV_CACHED, Owner.KV_RUNNING, Owner.IN_FLIGHT]


def test_a_new_ledger_hands_out_1_2_3() -> None:
    ledger = PageLedger(6)
    assert ledger.total == ledger.free == 5
    assert ledger.owner_of(0) is Owner.SINK
    assert ledger.take(2, Owner.ADAPTER) == [1, 2]
    assert ledger.take(3, Owner.KV_RUNNING) == [3, 4, 5]
    assert ledger.take(1, Owner.KV_RUNNING) is None
    ledger.check_invariants()


def test_pages_given_back_come_out_first_and_in_order() -> None:
    ledger = PageLedger(8)
    ledger.take(5, Owner.KV_RUNNING)
    ledger.give([4, 2], Owner.KV_RUNNING)
    ledger.give([5], Owner.KV_RUNNING)
    assert ledger.take(4, Owner.ADAPTER) == [5, 4, 2, 6]


def test_take_of_nothing() -> None:
    ledger = PageLedger(2)
    ledger.take(1, Owner.ADAPTER)
    assert ledger.take(0, Owner.ADAPTER) == []
    ledger.give([], Owner.ADAPTER)
    ledger.move([], Owner.ADAPTER, Owner.IN_FLIGHT)
    assert ledger.pages_of(Owner.ADAPTER) == [1]


def test_a_take_that_does_not_fit_changes_nothing() -> None:
    ledger = PageLedger(4)
    assert ledger.take(4, Owner.ADAPTER) is None
    assert ledger.free == 3
    assert ledger.take(3, Owner.ADAPTER) == [1, 2, 3]


def test_the_reserve_is_for_those_who_may_use_it() -> None:
    ledger = PageLedger(6, reserve=2)
    assert ledger.take(4, Owner.IN_FLIGHT, use_reserve=False) is None
    assert ledger.take(3, Owner.IN_FLIGHT, use_reserve=False) == [1, 2, 3]
    assert ledger.take(1, Owner.IN_FLIGHT, use_reserve=False) is None
    assert ledger.take(2, Owner.KV_RUNNING) == [4, 5]
    assert ledger.take(0, Owner.IN_FLIGHT, use_reserve=False) == []


def test_move_changes_the_owner_only() -> None:
    ledger = PageLedger(5)
    ledger.take(3, Owner.KV_RUNNING)
    ledger.move([3, 1], Owner.KV_RUNNING, Owner.KV_CACHED)
    assert ledger.pages_of(Owner.KV_CACHED) == [1, 3]
    assert ledger.owner_of(2) is Owner.KV_RUNNING
    assert [ledger.count(owner) for owner in Owner] == [1, 1, 0, 2, 1, 0]
    ledger.check_invariants()


def test_which_forwards_may_have_touched_pages_before_they_were_free() -> None:
    ledger = PageLedger(6)
    assert ledger.last_forward([1, 5]) == 0
    assert ledger.last_forward([]) == 0
    pages = ledger.take(3, Owner.KV_RUNNING)
    assert pages == [1, 2, 3]
    ledger.forwards = 4
    ledger.give([2], Owner.KV_RUNNING, last_forward=3)
    ledger.give([1], Owner.KV_RUNNING)
    assert [ledger.last_forward([page]) for page in (1, 2, 4)] == [4, 3, 0]
    assert ledger.last_forward([4, 2, 1]) == 4
    ledger.forwards = 7
    ledger.reset()
    assert ledger.last_forward([4]) == 7, "whoever had it may have used it until here"


def test_reset_gives_a_new_ledger() -> None:
    ledger = PageLedger(4, reserve=1)
    ledger.take(3, Owner.KV_RUNNING)
    ledger.give([2], Owner.KV_RUNNING)
    ledger.reset()
    ledger.check_invariants()
    assert ledger.reserve == 1
    assert ledger.take(3, Owner.ADAPTER) == [1, 2, 3]


@pytest.mark.parametrize(
    ("pages", "reason"),
    [
        pytest.param([1, 3], "page 3 is KV_RUNNING, not ADAPTER", id="another owner"),
        pytest.param([1, 4], "page 4 is FREE, not ADAPTER", id="free"),
        pytest.param([1, 1], "named twice", id="twice"),
        pytest.param([0], "page 0 is no page", id="sink"),
        pytest.param([1, -4], "page -4 is no page", id="negative"),
        pytest.param([5], "page 5 is outside", id="too large"),
    ],
)
def test_pages_of_others_are_neither_given_nor_moved(pages: list[int], reason: str) -> None:
    ledger = PageLedger(5)
    ledger.take(2, Owner.ADAPTER)
    ledger.take(1, Owner.KV_RUNNING)
    with pytest.raises(AssertionError, match=reason):
        ledger.give(pages, Owner.ADAPTER)
    with pytest.raises(AssertionError, match=reason):
        ledger.move(pages, Owner.ADAPTER, Owner.IN_FLIGHT)
    ledger.check_invariants()
    assert ledger.pages_of(Owner.ADAPTER) == [1, 2]


@pytest.mark.parametrize("owner", [Owner.FREE, Owner.SINK])
def test_free_and_sink_are_no_holders(owner: Owner) -> None:
    ledger = PageLedger(3)
    with pytest.raises(AssertionError, match=owner.name):
        ledger.take(1, owner)
    with pytest.raises(AssertionError, match=owner.name):
        ledger.give([1], owner)
    with pytest.raises(AssertionError, match=owner.name):
        ledger.move([1], Owner.ADAPTER, owner)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted at least 2 pages"):
        PageLedger(1)
    with pytest.raises(ValueError, match="reserve: wanted 0 pages or more, got -1"):
        PageLedger(2, reserve=-1)
    with pytest.raises(ValueError, match="take: wanted 0 pages or more, got -1"):
        PageLedger(2).take(-1, Owner.ADAPTER)


def break_owner(ledger: PageLedger) -> None:
    ledger._owners[1] = Owner.IN_FLIGHT


def break_count(ledger: PageLedger) -> None:
    ledger._counts[Owner.FREE] += 1


def break_sink(ledger: PageLedger) -> None:
    ledger._owners[0], ledger._owners[1] = ledger._owners[1], ledger._owners[0]


def break_stack(ledger: PageLedger) -> None:
    ledger._stack[0] = ledger._stack[1]


def break_reserve(ledger: PageLedger) -> None:
    ledger.reserve = -1


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (break_owner, "the counts say"),
        (break_count, "the counts say"),
        (break_sink, "the sink is"),
        (break_stack, "on the stack"),
        (break_reserve, "the reserve is"),
    ],
)
def test_check_invariants_sees_broken_state(break_it, reason: str) -> None:
    ledger = PageLedger(6)
    ledger.take(2, Owner.ADAPTER)
    ledger.check_invariants()
    break_it(ledger)
    with pytest.raises(AssertionError, match=reason):
        ledger.check_invariants()


class LedgerMachine(RuleBasedStateMachine):
    """Any owner takes, gives and moves in any order, beside a model that is one plain dict."""

    PAGES = 24
    RESERVE = 5

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(self.PAGES, reserve=self.RESERVE)
        self.held: dict[int, Owner] = {}

    @rule(n=st.integers(0, 12), owner=st.sampled_from(HOLDERS), use_reserve=st.booleans())
    def take(self, n: int, owner: Owner, use_reserve: bool) -> None:
        free = self.PAGES - 1 - len(self.held)
        room = free if use_reserve else free - self.RESERVE
        pages = self.ledger.take(n, owner, use_reserve=use_reserve)
        assert (pages is not None) == (n == 0 or n <= room)
        for page in pages or []:
            assert 0 < page < self.PAGES
            assert page not in self.held
            self.held[page] = owner
        assert len(pages or []) in (0, n)

    @rule(data=st.data(), owner=st.sampled_from(HOLDERS))
    def give(self, data: st.DataObject, owner: Owner) -> None:
        pages = self._some(data, owner)
        self.ledger.give(pages, owner)
        for page in pages:
            del self.held[page]

    @rule(data=st.data(), source=st.sampled_from(HOLDERS), to=st.sampled_from(HOLDERS))
    def move(self, data: st.DataObject, source: Owner, to: Owner) -> None:
        pages = self._some(data, source)
        self.ledger.move(pages, source, to)
        self.held.update(dict.fromkeys(pages, to))

    @rule()
    def reset(self) -> None:
        self.ledger.reset()
        self.held.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.ledger.check_invariants()
        counts = Counter(self.held.values())
        for owner in HOLDERS:
            assert self.ledger.count(owner) == counts[owner]
        assert sum(self.ledger.count(owner) for owner in Owner) == self.PAGES
        assert self.ledger.free == self.ledger.total - len(self.held)
        for page, owner in self.held.items():
            assert self.ledger.owner_of(page) is owner

    def _some(self, data: st.DataObject, owner: Owner) -> list[int]:
        mine = [page for page, held in self.held.items() if held is owner]
        return data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []


TestLedgerMachine = LedgerMachine.TestCase
