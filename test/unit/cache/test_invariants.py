"""check_invariants() sees state that was broken on purpose."""

import pytest

from sglang_graft.cache import HostCopy, State
from sglang_graft.pool.ledger import Owner


@pytest.fixture
def tree(make_tree, run):
    """Adapter "a" (pages 1 and 2) with node "xy" locked and "z" free; base node "b"."""
    tree = make_tree(12)
    adapter = tree.add_adapter("a", 2)
    tree.load(adapter)
    tree.loaded(adapter)
    for owner, text in ((adapter, "xy"), (adapter, "z"), (tree.base, "b")):
        pages = tree.ledger.take(len(text), Owner.KV_RUNNING)
        node = tree.insert(owner, run(text), pages, start=0).node
        if text == "xy":
            tree.lock(node)
    tree.check_invariants()
    return tree


def node_of(tree, run, text):
    return next(n for n in tree.adapter("a").children.values() if n.edge == run(text).tobytes())


def broken(tree, message):
    with pytest.raises(AssertionError, match=message):
        tree.check_invariants()


@pytest.mark.parametrize(
    ("name", "message"),
    [("_evictable", "evictable, counter says"), ("_protected", "protected, counter says")],
)
def test_counters(tree, name, message):
    setattr(tree, name, getattr(tree, name) + 1)
    broken(tree, message)


def test_kv_counter_of_an_adapter(tree):
    tree.adapter("a").kv_pages -= 1
    broken(tree, "3 KV pages, counter says 2")


def test_lock_below_zero(tree, run):
    node_of(tree, run, "z").lock = -1
    broken(tree, "locked -1 times")


def test_a_parent_locked_less_than_its_children(tree):
    tree.adapter("a").lock = 0
    broken(tree, "0 locks, 1 below it")


def test_parent_link(tree, run):
    node_of(tree, run, "z").parent = tree.base
    broken(tree, "not what its parent lists")


def test_listed_under_a_wrong_page(tree, run):
    node = node_of(tree, run, "z")
    node.key = run("q").tobytes()
    broken(tree, "not listed under its first page")


def test_tokens_without_pages(tree, run):
    node_of(tree, run, "z").key += b"12345678"
    broken(tree, "24 bytes of tokens for 1 pages")


def test_a_page_with_another_owner(tree, run):
    tree.ledger.move(node_of(tree, run, "z").pages, Owner.KV_CACHED, Owner.KV_RUNNING)
    broken(tree, "is KV_RUNNING, not KV_CACHED")


def test_a_page_in_two_nodes(tree, run):
    node_of(tree, run, "z").pages = tree.match(tree.base, run("b")).pages
    broken(tree, "a page is in two nodes")


def test_cached_pages_that_no_node_has(tree):
    tree.ledger.take(1, Owner.KV_CACHED)
    broken(tree, "tree holds 4 KV pages, the ledger has 5")


def test_weights_that_no_adapter_has(tree):
    tree.ledger.take(1, Owner.IN_FLIGHT)
    broken(tree, "0 pages of loading nodes, the ledger has 1")


def test_kv_of_an_absent_adapter(tree):
    adapter = tree.adapter("a")
    tree.ledger.give(adapter.pages, Owner.ADAPTER)
    adapter.pages, adapter.state = [], State.ABSENT
    assert tree.invalid_kv_pages() == 3
    broken(tree, "absent with 3 KV pages below it")


def test_a_leaf_missing_from_the_heap(tree, run):
    tree._victims.forget(node_of(tree, run, "z"))
    broken(tree, "are not in the victim heap")


def test_a_heap_out_of_order(tree):
    tree.shares.common.victims._lane.reverse()
    broken(tree, "out of order")


def test_a_node_gone_that_the_heap_keeps(tree, run):
    node = node_of(tree, run, "z")
    del node.parent.children[node.edge]
    node.parent.device_children -= 1
    node.adapter.kv_pages -= 1
    tree._evictable -= 1
    tree.ledger.give(node.pages, Owner.KV_CACHED)
    broken(tree, "keeps nodes that are gone")


def test_a_value_that_fell_unseen(tree, run):
    node_of(tree, run, "z").last_use = 0
    broken(tree, "value fell from")


def test_a_child_that_its_parent_does_not_count(tree):
    tree.adapter("a").device_children -= 1
    broken(tree, "2 children on the device, counter says 1")


def test_a_host_copy_without_a_host_tier(tree, run):
    node_of(tree, run, "z").host = HostCopy([1])
    broken(tree, "host copies without a host tier")


def test_a_use_in_the_future(tree):
    tree.base.last_use = 99
    broken(tree, "in the future")


def test_a_dropped_adapter_still_known(tree):
    tree.adapter("a").dropped = True
    broken(tree, "is still known")
