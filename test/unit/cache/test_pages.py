"""Loads of adapters: what they evict, and what they leave alone."""

from helpers_tree import checked, put, resident

from sglang_graft.cache import State


def test_a_load_evicts_others_but_nothing_in_vain(make_tree, run):
    tree = make_tree(6)
    held = put(tree, tree.base, run("ab")).node
    other = resident(tree, "a", 2)
    put(tree, other, run("x"))
    tree.lock(held)
    big = tree.add_adapter("big", 5)
    assert tree.load(big) is None
    assert (big.state, tree.match(other, run("x")).pages) == (State.ABSENT, [5])
    small = tree.add_adapter("small", 2)
    assert tree.load(small) == [5, 6]
    assert (other.state, other.kv_pages) == (State.RESIDENT, 0)
    checked(tree)


def test_a_load_can_spare_the_reserve(make_tree, run):
    tree = make_tree(6, reserve=2)
    put(tree, tree.base, run("abc"))
    adapter = tree.add_adapter("a", 5)
    assert tree.load(adapter, use_reserve=False) is None
    assert tree.match(tree.base, run("abc")).pages == [1, 2, 3]
    assert tree.load(adapter) is not None
    assert (tree.ledger.free, tree.evictable) == (0, 6)
    checked(tree)


def test_an_adapter_just_loaded_outlives_kv_used_before(make_tree, run):
    tree = make_tree(4)
    adapter = tree.add_adapter("a", 2)
    put(tree, tree.base, run("ab"))
    tree.load(adapter)
    assert (tree.evict(2), adapter.state) == (2, State.LOADING)
    checked(tree)
