"""Fences: what writes a page comes after the copy that still has it, whatever ends first."""

import pytest
from helpers_tiers import PAGE_TOKENS, World, kv_tag, tokens_of, weight_tag

from sglang_graft.cache import State
from sglang_graft.pool import Owner
from sglang_graft.tiers import Way


def stored(world: World, *runs: tuple[int, ...]) -> None:
    """KV of the base model whose write-backs have begun, and no more."""
    for run in runs:
        world.enqueue(None, run)
        world.step()
        world.finish(-1)
    while world.copier.advance("forward"):
        pass
    world.tiers.step([])
    assert world.transfers.pages_under_way(Way.STORE) > 0


def test_a_load_into_evicted_pages_comes_after_their_write_back() -> None:
    world = World(12, 30)
    world.register(0, 5)
    world.settle()
    stored(world, (0, 1, 0, 1))
    assert world.tree.evict(12) == 4
    world.ledger.take(world.ledger.free - 5, Owner.KV_RUNNING)
    wish = world.enqueue(0, (1,))
    assert wish
    world.tiers.step([wish.wish])
    assert world.nodes[0].state is State.LOADING
    assert not world.copier.advance("load"), "the write-back still reads those pages"
    world.copier.drain()
    world.transfers.poll()
    world.check_bytes()
    assert world.tree.base.host_kv_pages == 4


def test_a_forward_into_evicted_pages_comes_after_their_write_back() -> None:
    world = World(8, 30)
    stored(world, (0, 1, 0, 1))
    world.tree.evict(8)
    world.enqueue(None, (1, 1, 1, 1, 1))
    world.step()
    assert world.running
    world.copier.drain()
    world.transfers.poll()
    world.check_bytes()
    world.check()


def test_a_forward_into_pages_of_a_voided_load_comes_after_it() -> None:
    world = World(10, 30)
    world.register(0, 5)
    world.settle()
    wish = world.enqueue(0, (1,))
    assert wish
    world.tiers.step([wish.wish])
    pages = list(world.nodes[0].pages)
    world.queue.clear()
    world.enqueue(None, (1, 1, 1, 1, 1, 1))
    world.step()
    assert set(world.running[0].own) & set(pages)
    assert world.nodes[0].state is State.ABSENT
    world.copier.drain()
    for place, page in enumerate(world.running[0].own[:-1]):
        assert world.copier.device[page] == kv_tag(None, "", (1,) * (place + 1))
    world.transfers.poll()
    world.check()


def test_a_load_comes_after_the_forwards_launched_before_it() -> None:
    world = World(10, 30)
    world.register(0, 5)
    world.settle()
    world.enqueue(None, (1, 1, 1, 1, 1, 1))
    world.step()  # the forward that writes these pages has not run
    world.finish(0)
    wish = world.enqueue(0, (1,))
    assert wish
    world.tiers.write_back = None
    world.tiers.step([wish.wish])
    assert world.nodes[0].state is State.LOADING
    assert not world.copier.advance("load")
    world.copier.drain()
    world.transfers.poll()
    tags = [world.copier.device[page] for page in world.nodes[0].pages]
    assert tags == [weight_tag(0, row) for row in range(5)]


def test_a_part_of_a_node_on_its_way_lands_after_a_split() -> None:
    world = World(12, 30)
    stored(world, (0, 1, 0, 1))
    world.settle()
    world.tree.evict(12)
    node = world.tree.peek(world.tree.base, tokens_of((0, 1, 0, 1)))[0]
    assert world.tree.promote(node)
    world.transfers.load(node)
    assert world.tree.match(world.tree.base, tokens_of((0, 1))).pages == []
    world.check()
    world.copier.drain()
    assert len(world.transfers.poll()) == 1
    assert len(world.tree.match(world.tree.base, tokens_of((0, 1, 0, 1))).pages) == 4
    world.check_bytes()
    world.check()


def test_ranks_land_as_many_copies_as_the_slowest() -> None:
    world = World(12, 30)
    stored(world, (0, 1), (1, 1))
    world.copier.drain()
    world.transfers.agree = lambda count: min(count, 1)
    assert len(world.transfers.poll()) == 1
    assert len(world.transfers.poll()) == 1
    assert world.transfers.idle


def test_transfers_need_a_host_tier() -> None:
    world = World(12, 30)
    world.tree.host = None
    with pytest.raises(AssertionError, match="host tier"):
        type(world.transfers)(world.tree, world.copier)


def test_a_copy_of_a_page_that_is_being_copied_is_a_fault() -> None:
    world = World(12, 30)
    stored(world, (0, 1))
    node = world.tree.peek(world.tree.base, tokens_of((0, 1)))[0]
    assert len(node.key) == 2 * PAGE_TOKENS * 8
    with pytest.raises(AssertionError, match="is in a copy already"):
        world.transfers.store(node)
