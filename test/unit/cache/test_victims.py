"""The victim heap: lazy entries, order, and a bound on its size."""

import pytest

from sglang_graft.cache import AdapterNode, Lru, Node, UnifiedTree, make_policy
from sglang_graft.cache.node import HostCopy
from sglang_graft.cache.victims import VictimHeap
from sglang_graft.pool.ledger import Owner, PageLedger


def leaf(serial: int, last_use: int) -> Node:
    node = Node(serial, b"", [serial], b"")
    node.adapter = AdapterNode(0, "its adapter", 0)
    node.last_use = last_use
    return node


def serials(heap: VictimHeap) -> list[int]:
    found = []
    while (node := heap.pop()) is not None:
        heap.check_invariants()
        found.append(node.serial)
    return found


def filled(*nodes: Node) -> VictimHeap:
    heap = VictimHeap(Lru())
    for node in nodes:
        heap.push(node)
    heap.check_invariants()
    return heap


def test_smallest_value_first_and_creation_order_on_ties() -> None:
    assert serials(filled(leaf(3, 5), leaf(2, 7), leaf(1, 5))) == [1, 3, 2]


def test_an_empty_heap_has_no_victim() -> None:
    assert filled().pop() is None


def test_a_second_push_changes_nothing() -> None:
    node = leaf(1, 1)
    heap = filled(node, node)
    assert (len(heap), serials(heap)) == (1, [1])


def test_a_use_after_the_push_counts() -> None:
    first, second = leaf(1, 1), leaf(2, 2)
    heap = filled(first, second)
    first.last_use = 3
    assert serials(heap) == [2, 1]


def test_locked_nodes_and_parents_lose_their_entry_when_they_surface() -> None:
    locked, parent, free = leaf(1, 1), leaf(2, 2), leaf(3, 3)
    heap = filled(locked, parent, free)
    locked.lock = 1
    parent.children[b""] = free
    parent.device_children = 1
    assert heap.pop() is free
    assert (locked.entry, parent.entry, len(heap)) == (None, None, 0)
    locked.lock = 0
    heap.push(locked)
    assert heap.pop() is locked


def test_forgotten_nodes_never_come_out() -> None:
    first, second = leaf(1, 1), leaf(2, 2)
    heap = filled(first, second)
    heap.forget(first)
    heap.forget(first)
    heap.push(first)
    heap.check_invariants()
    assert serials(heap) == [1, 2]


def test_a_value_that_fell_with_the_shape_is_entered_anew() -> None:
    class Size:
        name = "size"

        def value(self, node: Node) -> float:
            return len(node.pages)

    first, second = leaf(1, 0), leaf(2, 0)
    first.pages, second.pages = [1, 2, 3], [4, 5]
    heap = VictimHeap(Size())
    heap.push(first)
    heap.push(second)
    first.pages = [1]
    heap.reshaped(first)
    heap.check_invariants()
    assert serials(heap) == [1, 2]


def test_new_prices_reorder_everything() -> None:
    class Sign:
        name = "sign"
        sign = 1

        def value(self, node: Node) -> float:
            return self.sign * node.last_use

    policy = Sign()
    heap = VictimHeap(policy)
    for serial in range(1, 6):
        heap.push(leaf(serial, serial))
    policy.sign = -1
    heap.reprice()
    heap.check_invariants()
    assert serials(heap) == [5, 4, 3, 2, 1]


def test_dead_entries_are_swept() -> None:
    nodes = [leaf(serial, serial) for serial in range(1, 501)]
    heap = filled(*nodes)
    for node in nodes[:400]:
        heap.forget(node)
    heap.check_invariants()
    assert len(heap) <= 2 * 100 + 64
    assert serials(heap) == list(range(401, 501))


def test_the_heap_does_not_grow_with_uses(make_tree, run) -> None:
    tree = make_tree(8)
    for _ in range(300):
        for text in ("ab", "ac", "d"):
            pages = tree.ledger.take(len(text), Owner.KV_RUNNING)
            node = tree.insert(tree.base, run(text), pages, start=0).node
            tree.lock(node)
            tree.match(tree.base, run(text))
            tree.unlock(node)
    assert len(tree._victims) == 3  # the leaves; "a" was never one while unlocked


def test_drops_do_not_leave_entries_behind(run) -> None:
    tree = UnifiedTree(PageLedger(9), page_tokens=2, policy=make_policy("lru"))
    for _ in range(300):
        adapter = tree.add_adapter("a", 1)
        tree.load(adapter)
        tree.insert(adapter, run("x"), tree.ledger.take(1, Owner.KV_RUNNING), start=0)
        assert tree.drop(adapter) == 2
    assert len(tree._victims) <= 65
    tree.check_invariants()


def test_unknown_policies_name_the_known_ones() -> None:
    with pytest.raises(ValueError, match="wanted one of cost, elora, lru; got 'mru'"):
        make_policy("mru")


def test_entries_in_rising_order_cost_no_heap_work_and_all_come_in_order() -> None:
    heap = filled(*(leaf(serial, used) for serial, used in enumerate((1, 2, 5, 3, 4, 6))))
    assert (len(heap._lane), len(heap._heap)) == (4, 2)
    assert serials(heap) == [0, 1, 3, 4, 2, 5]


def test_the_front_stays_the_smallest_part_of_a_large_order() -> None:
    heap = VictimHeap(Lru())
    numbers = [(serial * 7919) % 2003 for serial in range(2003)]
    nodes = {number: leaf(serial + 1, number) for serial, number in enumerate(numbers)}
    for number in numbers[:1500]:
        heap.push(nodes[number])
    assert [n.last_use for n in heap.coldest(200)] == sorted(numbers[:1500])[:200]
    heap.check_invariants()
    for number in numbers[1500:]:  # many of these belong into the front, more than it keeps
        heap.push(nodes[number])
        nodes[number].pages = [1]
    for number in range(600, 0, -1):
        extra = leaf(3000 + number, -number)
        heap.push(extra)
    heap.check_invariants()
    assert [n.last_use for n in heap.coldest(700)] == [*range(-600, 0), *range(100)]
    assert [e[3].last_use for e in heap.order()] == [*range(-600, 0), *range(2003)]
    found = []
    while (node := heap.pop()) is not None:
        found.append(node.last_use)
    assert found == [*range(-600, 0), *range(2003)]


def test_a_node_without_a_host_copy_is_seen_among_the_next() -> None:
    nodes = [leaf(serial, serial) for serial in range(1, 10)]
    for node in nodes[:5]:
        node.host = HostCopy([node.serial])
    heap = filled(*nodes)
    assert not heap.any_uncopied(5)
    assert heap.any_uncopied(6)
