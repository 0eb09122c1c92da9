"""The cost model: prices, ageing, and what they make of the order of victims."""

from array import array
from dataclasses import replace

import pytest

from sglang_graft.cache import AdapterNode, Cost, Node, Prices, Rates, UnifiedTree
from sglang_graft.pool.ledger import Owner, PageLedger

# 8 bytes a page: a copy takes 1 s a page, a read 4 s, a token 3 s and 1 s for each one before it.
RATES = Rates(
    h2d_bytes_per_s=8, disk_bytes_per_s=2, prefill_s_per_token=3, prefill_s_per_token_pair=1
)
PRICES = Prices(page_bytes=8, page_tokens=2, rates=RATES)


def kv(pages: int = 1, start: int = 0) -> Node:
    node = Node(1, bytes(16 * pages), list(range(1, pages + 1)), b"")
    node.start = start
    node.adapter = AdapterNode(2, "a", 1)
    return node


def weights() -> AdapterNode:
    node = AdapterNode(2, "a", 1)
    node.pages = [9]
    return node


def test_kv_costs_its_prefill_at_its_depth() -> None:
    assert PRICES.of(kv()).device == 2 * 3 + 2 * 1  # half of each pair counts
    assert PRICES.of(kv(start=2)).device == 2 * 3 + 2 * (4 + 1)
    assert PRICES.of(kv(pages=2)).device == (4 * 3 + 4 * 2) / 2


def test_weights_cost_a_read_and_a_copy() -> None:
    assert PRICES.of(weights()).device == 4 + 1


@pytest.mark.parametrize(("node", "saved"), [(kv(), 8 - 1), (weights(), 4)])
def test_a_host_tier_leaves_the_copy_to_pay_and_is_worth_the_rest(node: Node, saved: float) -> None:
    prices = replace(PRICES, host_tier=True)
    assert prices.of(node).device == 1
    assert prices.of(node).host == saved


def test_a_copy_slower_than_prefill_is_worth_next_to_nothing() -> None:
    slow = replace(PRICES, page_bytes=800, host_tier=True)
    assert slow.of(kv()).device == 8
    assert 0 < slow.of(kv()).host < 1e-9


def test_a_node_lives_for_its_uses_times_its_price() -> None:
    policy, node = Cost(PRICES), kv()
    policy.level = 100.0
    policy.used(node, 1, again=False)
    assert policy.value(node) == 100 + 8
    policy.used(node, 2, again=False)
    assert policy.value(node) == 100 + 1.5 * 8


def test_counts_fall_by_one_each_price_and_stay_in_their_bounds() -> None:
    policy, node = Cost(PRICES, most_uses=4), kv()
    for _ in range(9):
        policy.used(node, 1, again=False)
    assert node.uses == 4
    policy.level = 12.0
    policy.used(node, 2, again=False)
    assert node.uses == 4 - 1.5 + 1
    policy.level = 8000.0
    policy.used(node, 3, again=True)
    assert (node.uses, node.used_at) == (1.0, 8000.0)


def test_a_cap_below_one_use_is_refused() -> None:
    with pytest.raises(ValueError, match=r"most_uses: wanted 1 or more, got 0\.5"):
        Cost(PRICES, most_uses=0.5)


def test_a_next_turn_refreshes_but_does_not_count() -> None:
    policy, node = Cost(PRICES), kv()
    policy.used(node, 1, again=False)
    policy.used(node, 2, again=True)
    assert node.uses == 1.0


def test_the_level_rises_by_a_price_each_time_the_pool_turns_over() -> None:
    policy = Cost(PRICES)
    for _ in range(4):
        policy.evicted(kv(), 1, 1, 4)
    assert policy.level == 8
    policy.evicted(weights(), 2, 2, 4)
    assert policy.level == 8 + 5 / 2


def test_with_equal_prices_the_least_recently_used_leaves_first(run) -> None:
    tree = UnifiedTree(PageLedger(9), page_tokens=2, policy=Cost(PRICES, most_uses=1))
    adapters = [tree.add_adapter(name, 1) for name in "abcdefgh"]
    for adapter in adapters:
        tree.load(adapter)
        tree.loaded(adapter)
    tree.evict(1)  # raises the level: uses before and after it differ
    for place in (2, 5, 1, 6):
        tree.use(adapters[place])
        tree.evict(1)
    left = sorted((a for a in adapters if not a.pages), key=lambda a: (a.left, a.serial))
    assert [a.identity for a in left] == ["a", "b", "d", "e", "h"]


def test_a_load_makes_weights_young_without_a_use() -> None:
    policy, node = Cost(PRICES), weights()
    policy.level = 50.0
    policy.loaded(node, 1)
    assert (node.uses, policy.value(node)) == (0.0, 50 + 5)


def test_a_loaded_adapter_outlives_an_equal_one_that_came_before(run) -> None:
    tree = UnifiedTree(PageLedger(3), page_tokens=2, policy=Cost(PRICES))
    first, second, third = (tree.add_adapter(name, 1) for name in "abc")
    tree.load(first)
    tree.load(second)
    tree.load(third)  # evicts the first, and raises the level
    tree.load(first)
    assert (second.pages, bool(third.pages)) == ([], True)
    tree.check_invariants()


def test_often_asked_weights_outlive_kv_that_nobody_asks_again() -> None:
    tree = UnifiedTree(PageLedger(8), page_tokens=2, policy=Cost(PRICES, most_uses=2))
    adapter = tree.add_adapter("a", 1)
    tree.load(adapter)
    tree.loaded(adapter)
    for _ in range(4):
        tree.use(adapter)
    for token in range(10):  # least recently used would have taken it at the seventh
        tree.evict(1 - tree.ledger.free)
        pages = tree.ledger.take(1, Owner.KV_RUNNING)
        assert pages is not None
        tree.insert(tree.base, array("q", [token, token]), pages, start=0)
        tree.check_invariants()
    assert adapter.pages


def test_use_tells_a_next_turn_from_a_new_prompt(run) -> None:
    tree = UnifiedTree(PageLedger(16), page_tokens=2, policy=Cost(PRICES, most_uses=9))
    adapter = tree.add_adapter("a", 1)
    tree.load(adapter)
    tree.loaded(adapter)
    tree.use(adapter)

    def ask(text: str) -> None:
        match = tree.match(adapter, run(text))
        tree.use(match.node)
        tree.lock(match.node)
        pages = tree.ledger.take(len(text) - len(match.pages), Owner.KV_RUNNING)
        tree.insert(adapter, run(text), pages, start=2 * len(match.pages))
        tree.unlock(match.node)

    ask("ab")  # below an adapter without KV: new
    assert adapter.uses == 2
    ask("abc")  # goes on where "ab" ended
    assert adapter.uses == 2
    ask("ax")  # shares "a" only: new
    assert adapter.uses == 3
    ask("ay")  # ends at "a", which no request ended at
    assert adapter.uses == 4
    tree.check_invariants()


def test_a_priority_multiplies_the_price_and_slows_ageing() -> None:
    policy, plain, dear = Cost(PRICES), kv(), kv()
    dear.adapter.priority = 2
    for node in (plain, dear):
        policy.used(node, 1, again=False)
    assert policy.value(dear) == 4 * policy.value(plain)
    assert policy.host_value(dear) == 4 * policy.host_value(plain)
    for level in (2.0, 7.0, 20.0, 50.0):
        policy.level = level
        for again in (True, False):
            before = policy.value(dear)
            policy.used(dear, 2, again=again)
            assert policy.value(dear) >= before, "a use lowered a value"


def test_rounding_lowers_no_value() -> None:
    policy, node = Cost(PRICES, most_uses=4), kv()
    for turn in range(3000):
        policy.used(node, turn, again=turn % 4 > 0)
        before, host = policy.value(node), policy.host_value(node)
        policy.level += 0.1 * (turn % 7) / 3
        policy.used(node, turn, again=True)
        assert policy.value(node) >= before
        assert policy.host_value(node) >= host
