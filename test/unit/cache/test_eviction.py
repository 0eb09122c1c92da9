"""What eviction takes, in which order, with exact page numbers."""

import pytest
from helpers_tree import checked, put, resident

from sglang_graft.cache import State
from sglang_graft.pool.ledger import Owner


def test_eviction_takes_the_least_recently_used_leaf_first(make_tree, run):
    tree = make_tree(8)
    for text in ("ax", "ay", "b"):
        put(tree, tree.base, run(text))
    # a=1, x=2, y=4 (3 was a duplicate of a), b=3
    assert tree.match(tree.base, run("ax")).pages == [1, 2]
    order = []
    while tree.evictable:
        before = set(tree.ledger.pages_of(Owner.KV_CACHED))
        assert tree.evict(1) == 1
        order += before - set(tree.ledger.pages_of(Owner.KV_CACHED))
        checked(tree)
    assert order == [4, 3, 2, 1]
    assert tree.evict(1) == 0


def test_eviction_trims_the_end_of_a_leaf(make_tree, run):
    tree = make_tree(8)
    node = put(tree, tree.base, run("abcd")).node
    assert tree.evict(1) == 1
    assert node.pages == [1, 2, 3]
    assert tree.match(tree.base, run("abcd")) == ([1, 2, 3], node)
    # The cut page was the last given back, so it comes out first and can be appended again.
    assert put(tree, tree.base, run("abcd")).pages[:3] == [1, 2, 3]
    checked(tree)


def test_a_node_is_a_leaf_again_after_its_children(make_tree, run):
    tree = make_tree(6)
    parent = put(tree, tree.base, run("ab")).node
    child = put(tree, tree.base, run("abc")).node
    tree.lock(child)
    assert tree.evict(9) == 0  # settles the parent's old entry
    tree.unlock(child)
    assert tree.evict(1) == 1
    assert child.parent is None
    checked(tree)
    assert tree.evict(1) == 1
    assert parent.pages == [1]


def test_an_adapter_leaves_only_after_its_kv(make_tree, run):
    tree = make_tree(8)
    adapter = resident(tree, "a", 2)
    put(tree, adapter, run("xyz"))
    put(tree, tree.base, run("b"))
    assert tree.evict(3) == 3
    assert (adapter.state, adapter.kv_pages) == (State.RESIDENT, 0)
    # The base model's page was used later than the adapter.
    assert tree.evict(1) == 2
    assert (adapter.state, adapter.pages, adapter.evictions) == (State.ABSENT, [], 1)
    assert tree.match(tree.base, run("b")).pages == [6]
    assert tree.invalid_kv_pages() == 0
    checked(tree)


def test_the_base_model_is_no_victim(make_tree):
    tree = make_tree(4)
    assert tree.evict(4) == 0
    assert (tree.base.state, tree.load(tree.base)) == (State.RESIDENT, [])
    assert tree.adapter(None) is tree.base
    with pytest.raises(ValueError, match="base model cannot be dropped"):
        tree.drop(tree.base)


def test_a_copy_under_way_may_be_evicted(make_tree):
    tree = make_tree(4)
    adapter = tree.add_adapter("a", 3)
    pages = tree.load(adapter)
    assert pages == [1, 2, 3]
    assert tree.ledger.count(Owner.IN_FLIGHT) == 3
    assert tree.load(adapter) == []
    assert tree.evict(1) == 3
    assert (adapter.state, adapter.pages) == (State.ABSENT, [])
    with pytest.raises(AssertionError, match="'a' is absent"):
        tree.loaded(adapter)
    again = tree.load(adapter)
    assert again == pages
    assert again is not pages
    tree.loaded(adapter)
    assert tree.ledger.count(Owner.ADAPTER) == 3
    assert (adapter.loads, adapter.evictions) == (2, 1)
    checked(tree)
