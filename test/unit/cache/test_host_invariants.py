"""check_invariants() sees a host side that was broken on purpose."""

from array import array

import pytest

from sglang_graft.cache import Lru, Node, UnifiedTree
from sglang_graft.pool.ledger import Owner, PageLedger


def tokens(text: str) -> "array[int]":
    return array("q", [ord(letter) for letter in text for _ in range(2)])


@pytest.fixture
def tree() -> UnifiedTree:
    """Base nodes "ab" (on both sides), "c" (host alone) and an absent adapter with an image."""
    ledger = PageLedger(20)
    tree = UnifiedTree(ledger, page_tokens=2, policy=Lru(), host=PageLedger(20))
    assert tree.host is not None
    for text in ("c", "ab"):
        pages = ledger.take(len(text), Owner.KV_RUNNING)
        assert pages is not None
        node = tree.insert(tree.base, tokens(text), pages, start=0).node
        tree.host.landed(tree.host.add(node, len(text)) or [], Owner.KV_CACHED)
    tree.evict(1)
    adapter = tree.add_adapter("a", 2)
    tree.host.landed(tree.host.add(adapter, 2) or [], Owner.ADAPTER)
    tree.check_invariants()
    return tree


def node(tree: UnifiedTree, text: str) -> Node:
    return tree.peek(tree.base, tokens(text))[0]


def broken(tree: UnifiedTree, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        tree.check_invariants()


def test_a_host_page_in_two_nodes(tree: UnifiedTree) -> None:
    copy = node(tree, "c").host
    other = node(tree, "ab").host
    assert copy
    assert other
    copy.pages = other.pages[:1]
    broken(tree, "a host page is in two nodes")


def test_a_host_page_that_nobody_has(tree: UnifiedTree) -> None:
    assert tree.host
    tree.host.ledger.take(1, Owner.KV_CACHED)
    broken(tree, "6 host pages are taken, nodes hold 5, 0 are orphans")


def test_a_host_page_with_another_owner(tree: UnifiedTree) -> None:
    assert tree.host
    copy = node(tree, "c").host
    assert copy
    tree.host.ledger.move(copy.pages, Owner.KV_CACHED, Owner.ADAPTER)
    broken(tree, "is ADAPTER")


def test_the_counter_of_host_kv(tree: UnifiedTree) -> None:
    tree.base.host_kv_pages += 1
    broken(tree, "3 host KV pages, counter says 4")


def test_an_only_copy_missing_from_the_order(tree: UnifiedTree) -> None:
    assert tree.host
    copy = node(tree, "c").host
    assert copy
    tree.host._forget(copy)
    broken(tree, "are not in the order of victims")


def test_a_node_on_both_sides_that_is_not_listed_so(tree: UnifiedTree) -> None:
    assert tree.host
    tree.host._kv_twice.clear()
    broken(tree, "are on both sides, or listed so")


def test_a_reader_of_nobodys_page(tree: UnifiedTree) -> None:
    assert tree.host
    tree.host._readers[19] = 1
    broken(tree, "host page 19 is read, and nobody's")


def test_a_node_on_neither_side(tree: UnifiedTree) -> None:
    assert tree.host
    tree.host.release(node(tree, "c"))
    broken(tree, "has no pages")
