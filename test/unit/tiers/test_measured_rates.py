"""What is measured becomes a price at the end of a window, and not before."""

from array import array

import pytest

from sglang_graft.cache import Cost, Lru, Prices, UnifiedTree
from sglang_graft.pool.ledger import Owner, PageLedger
from sglang_graft.tiers import MeasuredRates


def make() -> tuple[UnifiedTree, MeasuredRates]:
    prices = Prices(page_bytes=1000, page_tokens=2)
    tree = UnifiedTree(PageLedger(9), page_tokens=2, policy=Cost(prices))
    return tree, MeasuredRates(tree, prices, window=10)


def tick(tree: UnifiedTree, times: int) -> None:
    for _ in range(times):
        tree.match(tree.base, array("q"))


def test_a_window_is_counted_on_the_logical_clock() -> None:
    tree, rates = make()
    rates.meter.prefill(100, 0, 2.0)
    before = rates.prices.rates
    tick(tree, 9)
    rates.step()
    assert rates.prices.rates is before
    tick(tree, 1)
    rates.step()
    assert rates.prices.rates.prefill_s_per_token == pytest.approx(0.02)
    assert rates.changes == 1
    rates.meter.prefill(100, 0, 200.0)
    rates.step()
    assert rates.changes == 1, "the next window has just begun"


def test_the_victims_are_ordered_by_the_new_prices() -> None:
    tree, rates = make()
    adapter = tree.add_adapter("a", 2)
    tree.load(adapter)
    tree.loaded(adapter)
    pages = tree.ledger.take(1, Owner.KV_RUNNING)
    assert pages is not None
    kv = tree.insert(tree.base, array("q", [1, 2]), pages, start=0).node
    tree.use(kv)
    assert list(tree.coldest(1)) == [adapter], "a read of 1000 bytes costs less than two tokens"
    rates.meter.prefill(100, 0, 1e-7)
    tick(tree, 10)
    rates.step()
    assert list(tree.coldest(1)) == [kv]
    tree.check_invariants()


def test_noise_changes_nothing() -> None:
    tree, rates = make()
    for seconds in (1.0, 1.1, 0.95):
        rates.meter.prefill(100, 0, seconds)
        tick(tree, 10)
        rates.step()
    assert rates.changes == 1


@pytest.mark.parametrize("priced", [True, False])
def test_an_order_without_prices_is_left_alone(
    priced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices = Prices(page_bytes=1000, page_tokens=2)
    policy = Cost(prices) if priced else Lru()
    tree = UnifiedTree(PageLedger(9), page_tokens=2, policy=policy)
    rates, ordered = MeasuredRates(tree, prices, window=10), []
    monkeypatch.setattr(tree, "reprice", lambda: ordered.append(rates.changes))
    rates.meter.prefill(100, 0, 2.0)
    tick(tree, 10)
    rates.step()
    assert rates.changes == 1
    assert ordered == ([1] if priced else [])
