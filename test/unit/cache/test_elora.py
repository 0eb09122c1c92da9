"""The published score."""

import math

from sglang_graft.cache import AdapterNode, Elora, Node


def node(serial: int, pages: int, visits: float, used_at: float) -> Node:
    found = Node(serial, b"", list(range(1, pages + 1)), b"")
    found.uses, found.used_at = visits, used_at
    found.adapter = AdapterNode(0, "its adapter", 0)
    return found


def adapter(serial: int, *, resident: bool) -> AdapterNode:
    found = AdapterNode(serial, str(serial), 1)
    found.pages = [serial] if resident else []
    return found


def test_larger_more_visited_and_later_used_nodes_are_worth_more() -> None:
    policy = Elora()
    policy._now = 100
    base = policy.value(node(1, 1, 1, 50))
    assert policy.value(node(2, 2, 1, 50)) > base
    assert policy.value(node(3, 1, 2, 50)) > base
    assert policy.value(node(4, 1, 1, 60)) > base


def test_values_rise_with_time() -> None:
    policy, one = Elora(), node(1, 1, 1, 50)
    policy._now = 50
    before = policy.value(one)
    policy._now = 60
    assert policy.value(one) > before


def test_too_few_adapters_on_the_device_make_adapters_dearer() -> None:
    policy = Elora(window=4, batch=32)
    here, *gone = (adapter(serial, resident=serial == 1) for serial in range(1, 5))
    for clock, found in enumerate((here, *gone)):
        policy.used(found, clock, again=False)
    before = policy.value(here)
    assert policy.changed()
    assert policy.value(here) > before + 1  # about log(4 wanted / 1 here)
    assert not policy.changed()


def test_enough_adapters_change_nothing() -> None:
    policy = Elora(window=2, batch=32)
    for serial in (1, 2):
        policy.used(adapter(serial, resident=True), serial, again=False)
    assert not policy.changed()


def test_a_priority_is_one_more_factor() -> None:
    policy, plain, dear = Elora(), node(1, 2, 3.0, 5.0), node(2, 2, 3.0, 5.0)
    dear.adapter.priority = 3
    assert math.isclose(policy.value(dear), policy.value(plain) + math.log(8))
