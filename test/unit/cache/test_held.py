"""Locks: what a request holds stays, and may leave again afterwards."""

import pytest
from helpers_tree import checked, put, resident

from sglang_graft.cache import State


def test_locked_leaves_stay_and_become_victims_when_unlocked(make_tree, run):
    tree = make_tree(6)
    first, second = (put(tree, tree.base, run(text)).node for text in ("ab", "cd"))
    tree.lock(first)
    assert tree.evict(6) == 2
    assert second.parent is None
    assert tree.match(tree.base, run("ab")).pages == [1, 2]
    with pytest.raises(AssertionError, match="was evicted"):
        tree.lock(second)
    tree.unlock(first)
    checked(tree)
    assert tree.evict(6) == 2


def test_a_request_holds_its_adapter(make_tree, run):
    tree = make_tree(6)
    adapter = resident(tree, "a", 2)
    tree.lock(tree.match(adapter, run("x")).node)
    assert (tree.protected, tree.evict(6), adapter.state) == (2, 0, State.RESIDENT)
    tree.unlock(adapter)
    assert (tree.evictable, tree.evict(1), adapter.state) == (2, 2, State.ABSENT)
    checked(tree)


def test_an_unlock_too_many_is_a_broken_invariant(make_tree):
    tree = make_tree(4)
    with pytest.raises(AssertionError, match="unlocked more often than locked"):
        tree.unlock(tree.base)
