"""Registrations, promotion, copies and slots, on a tiny pool."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_adapters import random_adapter, read_matrix
from helpers_residency import LAYOUT, SPEC, make, promote

from sglang_graft.adapters import Adapter
from sglang_graft.cache import State
from sglang_graft.pool import Owner
from sglang_graft.tiers import (
    KnownAdapter,
    Residency,
)
from sglang_graft.tiers.residency import PAGES_OF_A_REQUEST

ALL_LINEARS = {(layer, linear.name): 256 for layer in range(SPEC.layers) for linear in SPEC.linears}


def loaded_bytes(residency: Residency) -> int:
    tiers = residency.offer.__self__  # type: ignore[attr-defined]
    return int(tiers.transfers.adapter_pages_loaded) * LAYOUT.page_bytes


def adapter(seed: int, rank: int = 4) -> Adapter:
    return random_adapter(SPEC, {(0, "q_proj"): rank, (1, "down_proj"): rank}, seed)


def check(residency: Residency) -> None:
    residency.check_invariants()
    residency.table.check_invariants()
    residency.tree.check_invariants()
    residency.tree.ledger.check_invariants()


def assert_on_device(residency: Residency, slot: int, wanted: Adapter) -> None:
    for (layer, name), delta in wanted.deltas.items():
        arguments = (residency.table, residency.arena.buffer, slot, layer, name)
        assert torch.equal(read_matrix(*arguments, "A"), delta.a)
        assert torch.equal(read_matrix(*arguments, "B"), delta.b.t())


def test_bytes_come_from_the_host_pool_and_a_slot_from_activate() -> None:
    residency, one = make(), adapter(1)
    known = residency.add("id-1", "one", one)
    assert known.node.state is State.ABSENT
    assert not residency.is_ready("id-1")
    assert known.image.pages.numel() == 0, "the bytes are in the host pool alone"
    assert residency.host_bytes() == known.node.weight_pages * LAYOUT.page_bytes
    assert promote(residency, "id-1")
    check(residency)
    residency.tree.lock(known.node)
    slots = residency.activate([None, "id-1"])
    assert slots == {None: 0, "id-1": 1}
    assert known.node.state is State.RESIDENT
    assert loaded_bytes(residency) == len(known.image.pages) * LAYOUT.page_bytes
    assert_on_device(residency, 1, one)
    residency.activate(["id-1"])
    assert loaded_bytes(residency) == len(known.image.pages) * LAYOUT.page_bytes, (
        "a resident adapter is not copied"
    )
    check(residency)


def test_an_adapter_without_its_bytes_in_a_batch_is_a_fault() -> None:
    residency = make()
    known = residency.add("id-1", "one", adapter(1))
    residency.tree.load(known.node)
    with pytest.raises(AssertionError, match="adapter one is in a batch, and loading"):
        residency.activate(["id-1"])


def test_an_adapter_larger_than_the_host_pool_is_refused_with_its_flag() -> None:
    residency = make(pages=400)
    with pytest.raises(ValueError, match=r"host pool has 1,638,400; raise --graft-host-memory-gb"):
        residency.add("id-1", "huge", random_adapter(SPEC, ALL_LINEARS, 1))
    assert residency.known() == []
    assert residency.tree.adapter("seed 1") is None


def test_source_is_a_registration_of_the_node() -> None:
    residency = make()
    known = residency.add("id-1", "one", adapter(1))
    assert residency.source(known.node) == ("one", known.path)
    residency.add("id-2", "two", replace(adapter(1), path=Path("elsewhere")))
    assert residency.sources(known.node) == [("one", known.path), ("two", Path("elsewhere"))]
    residency.retire("id-1")
    assert residency.source(known.node) == ("two", Path("elsewhere"))
    residency.retire("id-2")
    assert len(residency.sources(known.node)) == 2


def test_a_reload_into_other_pages_renews_the_slot() -> None:
    residency, one = make(), adapter(1)
    known = residency.add("id-1", "one", one)
    promote(residency, "id-1")
    residency.activate(["id-1"])
    residency.tree.evict(residency.tree.ledger.total)
    taken = residency.tree.ledger.take(3, Owner.KV_RUNNING)
    assert taken is not None
    promote(residency, "id-1")
    assert set(known.node.pages).isdisjoint(taken)
    assert residency.activate(["id-1"])["id-1"] == 1
    assert_on_device(residency, 1, one)
    check(residency)


def test_slots_go_to_the_least_recently_used() -> None:
    residency = make(slots=3)
    adapters = {f"id-{seed}": adapter(seed) for seed in range(3)}
    for adapter_id, value in adapters.items():
        residency.add(adapter_id, adapter_id, value)
        assert promote(residency, adapter_id)
    assert residency.activate(["id-0", "id-1"]) == {None: 0, "id-0": 1, "id-1": 2}
    residency.activate(["id-0"])
    slot = residency.activate(["id-0", "id-2"])["id-2"]
    assert slot == 2, "id-1 was used longest ago"
    assert_on_device(residency, 2, adapters["id-2"])
    check(residency)


def test_equal_weights_share_pages_until_the_last_name_goes() -> None:
    residency = make()
    first = residency.add("id-1", "one", adapter(1))
    second = residency.add("id-2", "two", adapter(1))
    assert first.node is second.node
    assert first.image is second.image
    promote(residency, "id-1")
    assert residency.is_ready("id-2")
    assert residency.remove("id-1") == 0
    assert residency.node("id-2") is first.node
    check(residency)
    assert residency.remove("id-2") == len(first.image.pages)
    assert residency.node("id-2") is None
    assert residency.tree.ledger.free == residency.tree.ledger.total
    check(residency)


def test_a_running_request_keeps_its_removed_adapter() -> None:
    residency, one = make(), adapter(1)
    known = residency.add("id-1", "one", one)
    promote(residency, "id-1")
    residency.tree.lock(known.node)
    assert residency.remove("id-1") == 0
    assert not residency.is_known("id-1")
    slot = residency.activate(["id-1"])["id-1"]
    assert_on_device(residency, slot, one)
    again = residency.add("id-2", "one", adapter(1))
    assert again.node is not known.node
    residency.tree.unlock(known.node)
    assert residency.tree.ledger.free == residency.tree.ledger.total
    residency.purge()
    assert residency.node("id-1") is None
    check(residency)


def test_an_adapter_larger_than_the_pool_is_refused_with_both_sizes() -> None:
    residency = make(pages=3)
    with pytest.raises(ValueError, match=r"take \d+ pages .* whole pool has 2 .*max-total-tokens"):
        residency.add("id-1", "huge", adapter(1, rank=64))
    assert residency.known() == []
    check(residency)


def test_promote_says_no_when_everything_is_held() -> None:
    residency = make(pages=12)
    known = residency.add("id-1", "one", adapter(1))
    total = residency.tree.ledger.total
    assert residency.tree.ledger.take(total - known.node.weight_pages + 1, Owner.KV_RUNNING)
    assert not promote(residency, "id-1")
    assert known.node.state is State.ABSENT
    check(residency)


def held_by_a_request(residency: Residency, adapter_id: str) -> KnownAdapter:
    known = residency.add(adapter_id, adapter_id, adapter(1))
    assert promote(residency, adapter_id)
    residency.tree.lock(known.node)
    return known


def test_a_retired_adapter_serves_those_who_came_before() -> None:
    residency = make()
    known = held_by_a_request(residency, "id-1")
    assert residency.retire("id-1") == 0
    assert residency.held_pages("id-1") == known.node.weight_pages
    assert (residency.known(), residency.retired()) == ([], [known])
    # The request is retracted: its pages go, but it can start again.
    residency.tree.unlock(known.node)
    assert residency.tree.trim(known.node) == known.node.weight_pages
    assert residency.is_known("id-1")
    assert not residency.is_ready("id-1")
    assert promote(residency, "id-1")
    residency.tree.lock(known.node)
    residency.activate(["id-1"])
    check(residency)
    residency.tree.unlock(known.node)
    assert residency.remove("id-1") == known.node.weight_pages
    assert not residency.is_known("id-1")
    assert (residency.retired(), residency.host_bytes()) == ([], 0)
    check(residency)


def test_retiring_an_idle_adapter_frees_it_at_once() -> None:
    residency = make()
    known = residency.add("id-1", "one", adapter(1))
    promote(residency, "id-1")
    assert residency.retire("id-1") == known.node.weight_pages
    assert residency.held_pages("id-1") == 0
    check(residency)
    assert residency.remove("id-1") == 0
    assert residency.tree.adapter(known.node.identity) is None


def test_equal_weights_take_over_from_a_retired_adapter() -> None:
    residency = make()
    old = held_by_a_request(residency, "id-1")
    residency.retire("id-1")
    successor = residency.add("id-2", "one", adapter(1))
    assert (successor.node, successor.image) == (old.node, old.image)
    assert residency.host_bytes() == len(old.image.pages) * LAYOUT.page_bytes
    residency.tree.unlock(old.node)
    assert residency.remove("id-1") == 0
    assert residency.is_ready("id-2")
    check(residency)


def test_a_pinned_adapter_is_no_victim_until_it_is_retired() -> None:
    residency, one = make(), adapter(1)
    known = residency.add("id-1", "one", one)
    assert residency.pin_adapter("id-1")
    tree = residency.tree
    assert (tree.protected, tree.evictable) == (known.node.weight_pages, 0)
    assert tree.evict(tree.ledger.total) == 0
    residency.add("id-2", "two", adapter(2))
    promote(residency, "id-2")
    residency.activate(["id-2"])
    assert known.node.state is State.RESIDENT, "the next forward brings its bytes"
    check(residency)
    residency.pins.reset()
    assert (known.node.state, tree.protected) == (State.LOADING, known.node.weight_pages)
    check(residency)
    assert residency.retire("id-1") == known.node.weight_pages
    assert residency.pins.ids() == []
    check(residency)


def test_two_pins_of_equal_weights_hold_one_copy() -> None:
    residency = make()
    first = residency.add("id-1", "one", adapter(1))
    residency.add("id-2", "two", adapter(1))
    assert residency.pin_adapter("id-1")
    assert residency.pin_adapter("id-2")
    assert residency.pins.pages() == first.node.weight_pages
    assert residency.pins.pages(without=first.node) == 0
    check(residency)
    residency.remove("id-1")
    assert residency.tree.evict(100) == 0
    residency.pins.reset()
    check(residency)


def test_pins_leave_room_for_the_largest_other_adapter_and_a_request() -> None:
    residency = make(pages=30)
    total = residency.tree.ledger.total
    known = [residency.add(f"id-{i}", f"{i}", adapter(i, rank=24)) for i in range(8)]
    size = known[0].node.weight_pages
    fits = (total - PAGES_OF_A_REQUEST) // size - 1
    assert 0 < fits < len(known)
    for i in range(fits):
        assert residency.pin_adapter(f"id-{i}")
    with pytest.raises(ValueError, match=r"largest other adapter needs .* unload another pinned"):
        residency.pin_adapter(f"id-{fits}")
    assert len(residency.pins.ids()) == fits
    with pytest.raises(ValueError, match="pinned adapters hold"):
        residency.add("id-9", "large", adapter(9, rank=120))
    check(residency)


def test_a_pin_is_exchanged_or_stays() -> None:
    residency = make(pages=12)
    old = residency.add("old", "one", adapter(1))
    assert residency.pin_adapter("old")
    new = residency.add("new", "one", adapter(2))
    running = residency.tree.ledger.take(residency.tree.ledger.free, Owner.KV_RUNNING)
    assert running
    residency.tree.lock(old.node)
    assert not residency.pin_adapter("new", instead_of="old"), "a request holds the old one"
    assert residency.pins.ids() == ["old"]
    check(residency)
    residency.tree.unlock(old.node)
    assert residency.pin_adapter("new", instead_of="old")
    assert residency.pins.ids() == ["new"]
    assert (old.node.state, new.node.state) == (State.ABSENT, State.LOADING)
    check(residency)


def test_no_room_for_a_pin_now() -> None:
    residency = make(pages=12)
    known = residency.add("id-1", "one", adapter(1))
    assert residency.tree.ledger.take(residency.tree.ledger.total, Owner.KV_RUNNING)
    assert not residency.pin_adapter("id-1")
    assert (residency.pins.ids(), known.node.state) == ([], State.ABSENT)
    check(residency)


def test_a_pin_can_be_given_back_without_a_load() -> None:
    residency = make()
    residency.add("id-1", "one", adapter(1))
    assert residency.pin_adapter("id-1")
    assert promote(residency, "id-1")
    assert residency.unpin_adapter("id-1")
    assert not residency.unpin_adapter("id-1")
    node = residency.node("id-1")
    assert node is not None
    assert (node.lock, node.state, node.loads) == (0, State.RESIDENT, 1)
    check(residency)
    assert residency.pin_adapter("id-1")
    assert node.loads == 1
    check(residency)


def test_of_several_names_the_highest_priority_counts() -> None:
    residency = make()
    first = residency.add("id-1", "one", adapter(1))
    second = residency.add("id-2", "again", adapter(1))
    assert first.node is second.node
    residency.prioritize("id-1", -2)
    assert first.node.priority == 0, "the other name has none"
    residency.prioritize("id-2", 3)
    assert first.node.priority == 3
    residency.retire("id-2")
    assert first.node.priority == -2
    residency.remove("id-2")
    residency.prioritize("id-1", 1)
    residency.remove("id-1")
    assert first.node.priority == 0
    check(residency)
