"""Host copies: what keeps its place off the device, and which copy leaves when the host is full."""

from array import array
from string import ascii_lowercase

import pytest

from sglang_graft.cache import (
    AdapterNode,
    Lru,
    Node,
    Prices,
    State,
    UnifiedTree,
    make_policy,
)
from sglang_graft.cache.eviction import GROUP
from sglang_graft.pool.ledger import Owner, PageLedger


class Pool:
    """A tree with a host side; copies land at once."""

    def __init__(self, pages: int = 20, host_pages: int = 10, policy: str = "lru") -> None:
        self.ledger = PageLedger(pages + 1)
        self.host_ledger = PageLedger(host_pages + 1)
        chosen = make_policy(policy, Prices(page_bytes=8, page_tokens=2, host_tier=True))
        self.tree = UnifiedTree(self.ledger, page_tokens=2, policy=chosen, host=self.host_ledger)
        assert self.tree.host is not None
        self.host = self.tree.host

    def tokens(self, text: str) -> "array[int]":
        return array("q", [ord(letter) for letter in text for _ in range(2)])

    def put(self, text: str, adapter: AdapterNode | None = None) -> Node:
        pages = self.ledger.take(len(text), Owner.KV_RUNNING)
        assert pages is not None
        owner = adapter or self.tree.base
        return self.tree.insert(owner, self.tokens(text), pages, start=0).node

    def copy(self, node: Node, *, force: bool = False) -> bool:
        pages = self.host.add(node, len(node.pages), force=force)
        if pages is not None:
            adapter = isinstance(node, AdapterNode)
            self.host.landed(pages, Owner.ADAPTER if adapter else Owner.KV_CACHED)
        return pages is not None

    def image(self, name: str, pages: int) -> AdapterNode:
        adapter = self.tree.add_adapter(name, pages)
        taken = self.host.add(adapter, pages, force=True)
        assert taken is not None
        self.host.landed(taken, Owner.ADAPTER)
        return adapter

    def cached(self, text: str, adapter: AdapterNode | None = None) -> int:
        return len(self.tree.match(adapter or self.tree.base, self.tokens(text)).pages)

    def check(self) -> None:
        self.tree.check_invariants()
        self.ledger.check_invariants()


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_kv_with_a_copy_keeps_its_place(pool: Pool) -> None:
    node = pool.put("abc")
    pool.copy(node)
    assert pool.tree.evict(3) == 3
    assert (node.pages, node.lock, pool.tree.base.kv_pages) == ([], 0, 0)
    assert pool.tree.base.host_kv_pages == 3
    assert pool.cached("abc") == 0
    assert pool.tree.peek(pool.tree.base, pool.tokens("abcd")) == [node]
    assert pool.tree.demoted_pages == 3
    pool.check()


def test_kv_without_a_copy_is_forgotten(pool: Pool) -> None:
    pool.put("abc")
    pool.tree.evict(3)
    assert pool.tree.peek(pool.tree.base, pool.tokens("abc")) == []
    assert pool.tree.dropped_pages == 3
    pool.check()


def test_a_part_of_copied_kv_leaves() -> None:
    pool = Pool(host_pages=20)
    text = ascii_lowercase[: GROUP + 3]
    node = pool.put(text)
    pool.copy(node)
    assert pool.tree.evict(1) == 3, "up to where a group ends"
    assert pool.cached(text) == GROUP
    path = pool.tree.peek(pool.tree.base, pool.tokens(text))
    assert [len(n.key) // 16 for n in path] == [GROUP, 3]
    pool.check()
    assert pool.tree.evict(1) == GROUP
    assert pool.cached(text) == 0
    assert len(pool.tree.peek(pool.tree.base, pool.tokens(text))) == 2
    pool.check()


def test_groups_are_those_of_the_sequence_not_of_the_node() -> None:
    pool = Pool(pages=40, host_pages=40)
    text = ascii_lowercase[: 2 * GROUP + 2]
    for node in (pool.put(text[:3]), pool.put(text)):
        pool.copy(node)
    assert [n.start for n in pool.tree.peek(pool.tree.base, pool.tokens(text))] == [0, 3]
    assert pool.tree.evict(4) == 2 + GROUP
    assert pool.cached(text) == GROUP
    pool.check()


def test_a_path_that_comes_and_goes_is_not_cut_smaller_and_smaller() -> None:
    pool = Pool(pages=40, host_pages=40)
    text = ascii_lowercase[: 3 * GROUP]
    pool.copy(pool.put(text))
    for wanted in (1, 5, 2, 7, 3, 1, 11, 4, 6, 1, 9, 2):
        pool.tree.evict(wanted)
        for node in pool.tree.peek(pool.tree.base, pool.tokens(text)):
            if not node.pages:
                pages = pool.tree.promote(node)
                assert pages is not None
                pool.tree.landed(pages)
        assert pool.cached(text) == 3 * GROUP
        pool.check()
    assert len(pool.tree.peek(pool.tree.base, pool.tokens(text))) <= 3


def test_promotion_and_landing(pool: Pool) -> None:
    node = pool.put("ab")
    pool.copy(node)
    pool.tree.evict(2)
    pages = pool.tree.promote(node)
    assert pages is not None
    assert pool.cached("ab") == 0, "pages in flight hold nothing yet"
    assert pool.ledger.count(Owner.IN_FLIGHT) == 2
    pool.check()
    pool.tree.landed(pages)
    assert pool.cached("ab") == 2
    pool.check()


@pytest.mark.parametrize("policy", ["cost", "lru"])
def test_what_was_promoted_is_not_the_next_victim(policy: str) -> None:
    pool = Pool(pages=9, policy=policy)
    node = pool.put("abc")
    pool.copy(node)
    pool.tree.evict(3)
    others = [pool.put(text) for text in ("uvw", "xyz", "rst")]
    pool.tree.landed(pool.tree.promote(node) or [])  # the first of the others makes room
    pool.tree.evict(6)
    assert [other.pages for other in others] == [[], [], []]
    assert pool.cached("abc") == 3
    pool.check()


@pytest.mark.parametrize("policy", ["cost", "lru"])
def test_what_a_request_waits_for_is_not_the_next_victim(policy: str) -> None:
    pool = Pool(policy=policy)
    node, other = pool.put("abc"), pool.put("uvw")
    for held in (node, other):
        pool.tree.lock(held)
    pool.put("xyz")
    pool.tree.evict(3)  # time goes on, for every policy
    for held in (node, other):
        pool.tree.unlock(held)
    pool.tree.expect(pool.tree.base, pool.tokens("abcd"))
    pool.tree.evict(3)
    assert (len(node.pages), len(other.pages)) == (3, 0)
    pool.check()


def test_promotion_keeps_the_path_it_continues(pool: Pool) -> None:
    upper = pool.put("ab")
    lower = pool.put("abcd")
    for node in (upper, lower):
        pool.copy(node)
    pool.tree.evict(2)
    held = pool.ledger.take(pool.ledger.free - 1, Owner.KV_RUNNING)
    assert held is not None
    assert pool.tree.promote(lower) is None, "only its own parent could make room"
    assert upper.pages
    pool.check()


def test_kv_computed_anew_takes_the_place_of_its_copy(pool: Pool) -> None:
    node = pool.put("abc")
    pool.copy(node)
    pool.tree.evict(3)
    assert pool.put("abcd").parent is node
    assert pool.cached("abcd") == 4
    pool.check()


def test_kv_computed_anew_voids_a_promotion(pool: Pool) -> None:
    freed: list[int] = []
    node = pool.put("abc")
    pool.copy(node)
    pool.tree.evict(3)
    flying = list(pool.tree.promote(node) or [])
    pool.tree.on_freed = freed.extend
    pool.put("abc")
    assert freed == flying
    assert set(node.pages).isdisjoint(flying)
    pool.check()


def test_an_adapter_leaves_before_its_kv_on_the_host(pool: Pool) -> None:
    adapter = pool.image("a", 2)
    pool.tree.load(adapter)
    pool.tree.loaded(adapter)
    node = pool.put("xy", adapter)
    pool.copy(node)
    pool.tree.evict(4)
    assert (adapter.state, adapter.kv_pages, adapter.host_kv_pages) == (State.ABSENT, 0, 2)
    assert pool.tree.invalid_kv_pages() == 0
    pool.check()
    pool.tree.load(adapter)
    pool.tree.loaded(adapter)
    pool.tree.landed(pool.tree.promote(node) or [])
    assert pool.cached("xy", adapter) == 2
    pool.check()


def test_a_copy_of_warm_kv_makes_room_for_cold_kv(pool: Pool) -> None:
    cold, warm = pool.put("ab"), pool.put("cdefghij")
    assert pool.copy(warm)
    pool.host_ledger.take(1, Owner.KV_CACHED)  # only one page is left
    assert pool.copy(cold)
    assert warm.host is None, "it is far from leaving the device"


def test_the_only_copy_of_colder_kv_makes_room(pool: Pool) -> None:
    for text in ("abcde", "fghij"):
        pool.copy(pool.put(text))
        pool.tree.evict(5)
    pool.cached("abcde")
    assert pool.copy(pool.put("xy"))
    assert pool.tree.peek(pool.tree.base, pool.tokens("fghij")) == []
    assert len(pool.tree.peek(pool.tree.base, pool.tokens("abcde"))) == 1
    assert pool.host.dropped_pages == 5
    pool.check()


def test_warmer_copies_stay(pool: Pool) -> None:
    cold = pool.put("xy")
    pool.copy(pool.put("abcdefghij"))
    pool.tree.lock(cold)
    pool.tree.evict(10)
    pool.tree.unlock(cold)
    assert not pool.copy(cold), "what is on the host alone is worth more"
    pool.check()


def test_an_image_takes_any_room_that_can_go(pool: Pool) -> None:
    pool.copy(pool.put("abcdefghij"))
    pool.tree.evict(10)
    pool.cached("abcdefghij")
    assert pool.image("a", 4).host
    pool.check()


def test_images_of_adapters_on_the_device_go_last(pool: Pool) -> None:
    resident, absent = pool.image("resident", 4), pool.image("absent", 4)
    pool.tree.load(resident)
    pool.tree.loaded(resident)
    pool.image("next", 5)
    assert resident.host
    assert absent.host is None
    pool.image("more", 5)
    assert resident.host is None or pool.tree.adapter("next").host is None
    pool.check()


def test_spared_images_stay(pool: Pool) -> None:
    first = pool.image("first", 6)
    second = pool.tree.add_adapter("second", 6)
    assert pool.host.add(second, 6, force=True, spare={first.serial}) is None
    assert first.host
    pool.check()


def test_pages_in_use_become_free_when_the_copy_ends(pool: Pool) -> None:
    adapter = pool.image("a", 3)
    assert adapter.host is not None
    pages = list(adapter.host.pages)
    pool.host.begin_read(pages)
    pool.tree.drop(adapter)
    assert pool.host_ledger.free == 7
    pool.check()
    pool.host.end_read(pages)
    assert pool.host_ledger.free == 10
    pool.check()


def test_pages_being_written_become_free_when_the_copy_ends(pool: Pool) -> None:
    node = pool.put("abc")
    pages = pool.host.add(node, 3)
    assert pages is not None
    assert not pool.host.is_readable(node)
    pool.tree.reset()
    assert pool.host_ledger.free == 7
    pool.check()
    pool.host.landed(pages, Owner.KV_CACHED)
    assert pool.host_ledger.free == 10
    pool.check()


def test_reset_frees_kv_on_both_sides_and_keeps_images(pool: Pool) -> None:
    adapter = pool.image("a", 2)
    pool.tree.load(adapter)
    pool.tree.loaded(adapter)
    pool.copy(pool.put("xy", adapter))
    pool.copy(pool.put("z"))
    pool.tree.evict(1)
    pool.tree.reset()
    assert pool.ledger.free == pool.ledger.total
    assert pool.host_ledger.free == 8
    assert adapter.host
    pool.check()


def test_a_copy_needs_the_copy_above_it(pool: Pool) -> None:
    pool.put("ab")
    lower = pool.put("abcd")
    with pytest.raises(AssertionError, match="copied before its parent"):
        pool.copy(lower)


def test_coldest_is_the_order_of_eviction(pool: Pool) -> None:
    nodes = [pool.put(text) for text in ("a", "b", "c", "de")]
    pool.cached("b")
    order = list(pool.tree.coldest(10))
    assert order == [nodes[0], nodes[2], nodes[3]], "b has an entry that is out of date"
    pool.tree.evict(1)
    assert pool.cached("a") == 0
    assert list(pool.tree.coldest(1)) in ([], [nodes[2]])


def test_reprice_renews_both_orders(pool: Pool) -> None:
    first, second = pool.put("a"), pool.put("b")
    for node in (first, second):
        pool.copy(node)
    pool.tree.evict(2)
    first.last_use = 99  # as if the policy had changed its mind
    pool.tree._clock = 100
    pool.tree.base.last_use = 100
    pool.tree.reprice()
    pool.check()
    pool.host_ledger.take(8, Owner.KV_CACHED)
    pool.copy(pool.put("z"))
    assert first.host
    assert second.host is None


def test_room_that_is_not_enough_costs_nobody_a_copy(pool: Pool) -> None:
    filler = pool.image("filler", 7)
    pool.tree.load(filler)
    pool.tree.loaded(filler)
    older, newer = pool.put("abcdefgh"), pool.put("xy")
    pool.copy(newer)
    assert not pool.copy(older)
    assert newer.host, "three pages would not have been enough for eight"
    assert pool.host_ledger.free == 1
    pool.check()


def test_a_chain_of_only_copies_leaves_from_its_end_for_an_image(pool: Pool) -> None:
    upper, lower = pool.put("ab"), pool.put("abcd")
    other = pool.put("xyz")
    for node in (upper, lower, other):
        pool.copy(node)
    pool.tree.evict(7)
    pool.image("a", 7)
    assert (upper.host, lower.host) == (None, None)
    assert other.host
    assert pool.tree.peek(pool.tree.base, pool.tokens("abcd")) == []
    pool.check()


@pytest.mark.parametrize("order", ["top-down", "bottom-up"])
def test_a_chain_of_copies_of_kv_on_both_sides_leaves_for_an_image(pool: Pool, order: str) -> None:
    path = [pool.put(text) for text in ("ab", "abcde", "abcdefghij")]
    for node in path:
        assert pool.copy(node)
    if order == "bottom-up":
        pool.cached("ab")  # the end of the path is the last in the order of use
    pool.check()
    adapter = pool.image("x", 9)
    assert adapter.host is not None
    assert [node.host for node in path] == [None] * 3
    assert pool.cached("abcdefghij") == 10, "what is on the device stays"
    pool.check()


def test_copies_above_an_only_copy_leave_for_an_image(pool: Pool) -> None:
    top = pool.put("abcd")
    pool.copy(top)
    end = pool.put("abcdefgh")
    pool.copy(end)
    assert pool.tree.evict(4) == 4
    assert (bool(top.pages), bool(end.pages)) == (True, False)
    adapter = pool.image("x", 10)
    assert adapter.host is not None
    assert top.host is None
    assert pool.cached("abcdefgh") == 4
    pool.check()


def test_an_image_finds_room_behind_many_that_are_spared() -> None:
    pool = Pool(pages=60, host_pages=20)
    adapters = [pool.image(name, 1) for name in "abcdefghijklmnopqrst"]
    for adapter in adapters:
        assert pool.tree.load(adapter)
        pool.tree.loaded(adapter)
    spare = {adapter.serial for adapter in adapters[1:]}
    new = pool.tree.add_adapter("new", 1)
    assert pool.host.add(new, 1, force=True, spare=spare)
    assert [adapter.host is None for adapter in adapters] == [True, *[False] * 19]


class BySize(Lru):
    """Large nodes are worth more."""

    def value(self, node: Node) -> float:
        return len(node.key)


def test_a_value_that_falls_by_a_split_is_seen_on_the_host() -> None:
    pool = Pool()
    pool.tree.policy = pool.tree._victims._policy = pool.host._policy = BySize()
    pool.copy(pool.put("abcd"))
    pool.tree.evict(4)
    pool.cached("abx")
    pool.check()
    assert len(pool.tree.peek(pool.tree.base, pool.tokens("abcd"))) == 2
