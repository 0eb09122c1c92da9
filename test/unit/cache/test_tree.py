"""Stories of the tree with exact page numbers."""

from array import array

import pytest
from helpers_tree import checked, put, resident

from sglang_graft.cache import AdapterNode, Lru, State, UnifiedTree
from sglang_graft.pool.ledger import Owner, PageLedger


def test_miss_then_hit(make_tree, run):
    tree = make_tree(8)
    assert tree.match(tree.base, run("abc")) == ([], tree.base)
    done = put(tree, tree.base, run("abc"))
    assert (done.cached_tokens_before, done.duplicates, done.pages) == (0, 0, [1, 2, 3])
    assert tree.match(tree.base, run("abcd")) == ([1, 2, 3], done.node)
    assert done.node.hits == 1
    assert (tree.evictable, tree.protected, tree.ledger.free) == (3, 0, 5)
    checked(tree)


def test_a_part_of_a_page_never_matches(make_tree, run):
    tree = make_tree(8)
    put(tree, tree.base, run("ab"))
    assert tree.match(tree.base, run("ab")[:3]).pages == [1]
    assert tree.match(tree.base, run("ab")[:1]) == ([], tree.base)
    assert tree.match(tree.base, array("q")) == ([], tree.base)
    checked(tree)


def test_a_match_inside_a_node_splits_it_and_keeps_the_lower_object(make_tree, run):
    tree = make_tree(8)
    lower = put(tree, tree.base, run("abcd")).node
    tree.lock(lower)
    found = tree.match(tree.base, run("abx"))
    assert (found.pages, lower.pages) == ([1, 2], [3, 4])
    assert lower.parent is found.node
    assert (found.node.lock, lower.lock, tree.base.lock) == (1, 1, 1)
    assert tree.match(tree.base, run("abcd")) == ([1, 2, 3, 4], lower)
    tree.unlock(lower)
    assert (tree.evictable, tree.protected) == (4, 0)
    checked(tree)


def test_insert_branches_where_runs_part(make_tree, run):
    tree = make_tree(8)
    put(tree, tree.base, run("abc"))
    done = put(tree, tree.base, run("abxy"))
    assert (done.cached_tokens_before, done.duplicates) == (4, 2)
    # Pages 4 and 5 held "ab" a second time and are free again; "xy" keeps 6 and 7.
    assert done.pages == [1, 2, 6, 7]
    assert tree.ledger.take(2, Owner.KV_RUNNING) == [4, 5]
    tree.ledger.give([4, 5], Owner.KV_RUNNING)
    checked(tree)


def test_a_duplicate_insert_gives_all_its_pages_back(make_tree, run):
    tree = make_tree(8)
    first = put(tree, tree.base, run("abc"))
    again = put(tree, tree.base, run("abc"))
    assert again == (first.node, 6, 3, [1, 2, 3])
    assert tree.ledger.free == 5
    checked(tree)


def test_insert_below_a_locked_prefix(make_tree, run):
    tree = make_tree(8)
    prefix = put(tree, tree.base, run("ab")).node
    tree.lock(prefix)
    done = put(tree, tree.base, run("abcd"), start=4)
    assert (done.cached_tokens_before, done.duplicates, done.pages) == (4, 0, [1, 2, 3, 4])
    tree.lock(done.node)
    tree.unlock(prefix)
    assert (tree.evictable, tree.protected) == (0, 4)
    checked(tree)


def test_insert_refuses_a_prefix_that_nobody_holds(make_tree, run):
    tree = make_tree(8)
    put(tree, tree.base, run("ab"))
    with pytest.raises(AssertionError, match="nobody locks 4 tokens"):
        put(tree, tree.base, run("abcd"), start=4)
    with pytest.raises(AssertionError, match="the caller locked 2 tokens, but 0 are cached"):
        put(tree, tree.base, run("xy"), start=2)
    with pytest.raises(AssertionError, match="KV for absent adapter 'a'"):
        put(tree, tree.add_adapter("a", 1), run("a"))


def test_tokens_must_be_int64(make_tree):
    tree = make_tree(4)
    with pytest.raises(ValueError, match=r"wanted array\('q'\) of int64, got array\('i'\)"):
        tree.match(tree.base, array("i", [1, 2]))


def test_salts_are_separate_spaces(make_tree, run):
    tree = make_tree(8)
    plain = put(tree, tree.base, run("ab"))
    salted = put(tree, tree.base, run("ab"), salt="tenant")
    assert (plain.pages, salted.pages, salted.duplicates) == ([1, 2], [3, 4], 0)
    assert tree.match(tree.base, run("ax"), salt="tenant").pages == [3]
    assert tree.match(tree.base, run("ab"), salt="tenant").pages == [3, 4]
    assert tree.match(tree.base, run("ab")).pages == [1, 2]
    assert tree.match(tree.base, run("ab"), salt="other").pages == []
    checked(tree)


def test_a_salt_may_be_any_string(make_tree, run):
    tree = make_tree(8)
    for salt in ("\ud800", "\u00e9", "\0"):
        assert put(tree, tree.base, run("a"), salt=salt).duplicates == 0
        assert len(tree.match(tree.base, run("a"), salt=salt).pages) == 1
    checked(tree)


def test_adapters_are_separate_spaces(make_tree, run):
    tree = make_tree(12)
    first, second = resident(tree, "a", 2), resident(tree, "b", 2)
    assert put(tree, first, run("xy")).pages == [5, 6]
    assert tree.match(second, run("xy")) == ([], second)
    assert tree.match(tree.base, run("xy")) == ([], tree.base)
    assert [node.identity for node in tree.adapters()] == [None, "a", "b"]
    assert (first.kv_pages, second.kv_pages) == (2, 0)
    checked(tree)


def test_announcing_the_same_identity_again_keeps_its_kv(make_tree, run):
    tree = make_tree(8)
    adapter = resident(tree, "a", 2)
    put(tree, adapter, run("xy"))
    assert tree.add_adapter("a", 2) is adapter
    assert tree.match(adapter, run("xy")).pages == [3, 4]


def test_sizes_that_cannot_be(make_tree):
    tree = make_tree(4)
    with pytest.raises(ValueError, match=r"at most 4 pages .* got 5; raise --mem-fraction-static"):
        tree.add_adapter("a", 5)
    tree.add_adapter("a", 4)
    with pytest.raises(ValueError, match=r"wanted the 4 pages .* got 3"):
        tree.add_adapter("a", 3)
    with pytest.raises(ValueError, match="page_tokens: wanted 1 or more, got 0"):
        UnifiedTree(PageLedger(4), page_tokens=0, policy=Lru())


def test_drop_of_an_idle_adapter_frees_all_at_once(make_tree, run):
    tree = make_tree(8)
    adapter = resident(tree, "a", 2)
    put(tree, adapter, run("xy"))
    assert tree.drop(adapter) == 4
    assert (tree.ledger.free, tree.adapter("a"), tree.drop(adapter)) == (8, None, 0)
    with pytest.raises(ValueError, match="'a' was dropped: add it again"):
        tree.load(adapter)
    checked(tree)


def test_trim_frees_what_nobody_holds_and_the_adapter_stays_known(make_tree, run):
    tree = make_tree(12)
    adapter = resident(tree, "a", 2)
    held = put(tree, adapter, run("xy")).node
    put(tree, adapter, run("z"))
    tree.lock(held)
    assert tree.trim(adapter) == 1  # "z"
    assert tree.match(adapter, run("xy")).node is held
    tree.unlock(held)
    assert tree.trim(adapter) == 4
    assert (tree.adapter("a"), adapter.state, tree.trim(adapter)) == (adapter, State.ABSENT, 0)
    assert tree.load(adapter) is not None
    checked(tree)


def test_drop_of_a_held_adapter_ends_with_its_last_request(make_tree, run):
    tree = make_tree(12)
    adapter = resident(tree, "a", 2)
    held = put(tree, adapter, run("xy")).node
    put(tree, adapter, run("z"))
    tree.lock(held)
    assert tree.drop(adapter) == 1  # "z"; the weights and "xy" are held
    assert tree.match(adapter, run("xy")) == ([], adapter)
    successor = tree.add_adapter("a", 2)
    assert successor is not adapter
    assert tree.adapters() == [tree.base, successor]
    checked(tree)
    # The request goes on: its next chunk is taken, and it learns the page numbers of its path.
    done = put(tree, adapter, run("xyw"), start=4)
    assert done.pages[:2] == held.pages
    tree.lock(done.node)
    tree.unlock(held)
    checked(tree)
    tree.unlock(done.node)
    assert (tree.ledger.free, tree.evictable, tree.protected) == (12, 0, 0)
    assert (adapter.state, adapter.pages) == (State.ABSENT, [])
    checked(tree)


def test_reset_frees_everything_and_knows_its_adapters(make_tree, run):
    tree = make_tree(8)
    adapter = resident(tree, "a", 2)
    node = put(tree, adapter, run("xy")).node
    put(tree, tree.base, run("b"))
    tree.lock(node)
    with pytest.raises(AssertionError, match="requests hold 4 pages"):
        tree.reset()
    tree.unlock(node)
    tree.reset()
    assert (tree.ledger.free, tree.evictable, adapter.state) == (8, 0, State.ABSENT)
    assert tree.adapter("a") is adapter
    assert tree.match(tree.base, run("b")).pages == []
    checked(tree)


def test_nodes_have_no_dict(make_tree):
    assert not hasattr(make_tree(2).base, "__dict__")
    assert isinstance(make_tree(2).base, AdapterNode)
