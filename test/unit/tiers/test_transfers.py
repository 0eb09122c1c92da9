"""Fences: what writes a page comes after the copy that still has it, whatever ends first."""

from dataclasses import replace

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
    world.ledger.take(world.ledger.free - 1, Owner.KV_RUNNING)
    assert world.tree.evict(12) == 4
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


def cold_in_a_pool_with_free_pages() -> World:
    """A registered adapter of 5 pages, and a forward of the base model that has not run."""
    world = World(20, 30)
    world.register(0, 5)
    world.settle()
    world.enqueue(None, (1, 1))
    world.step()
    return world


def test_a_load_into_pages_that_no_forward_touches_runs_beside_it() -> None:
    world = cold_in_a_pool_with_free_pages()
    wish = world.enqueue(0, (1,))
    assert wish
    world.tiers.step([wish.wish])
    while world.copier.advance("load"):
        pass
    assert len(world.transfers.poll()) == 1
    assert world.nodes[0].state is State.RESIDENT
    world.check()


def test_a_load_into_pages_that_were_used_long_ago_runs_beside_later_forwards() -> None:
    world = World(12, 30)
    world.register(0, 5)
    world.settle()
    world.enqueue(None, (0, 1, 0, 1))
    world.step()
    world.finish(0)
    world.settle()  # this KV has a copy, and nobody reads it from here on
    world.enqueue(None, (1, 1, 1, 1))
    world.step()  # this forward does not run
    wish = world.enqueue(0, (1,))
    assert wish
    world.tiers.step([wish.wish])
    assert world.tree.demoted_pages > 0, "its pages were in use"
    while world.copier.advance("load"):
        pass
    assert len(world.transfers.poll()) == 1
    world.copier.drain()
    world.check_bytes()


def test_a_followed_load_can_be_used_at_once_and_holds_the_forward() -> None:
    world = cold_in_a_pool_with_free_pages()
    request = world.enqueue(0, (1,))
    assert request
    world.step()
    assert request in world.running
    assert world.nodes[0].state is State.RESIDENT
    world.check()
    while world.copier.advance("forward"):
        pass
    assert world.copier.queues["forward"], "its forward waits for the copy"
    assert world.counters.total.seconds_waited == 0
    world.copier.drain()
    world.transfers.poll()
    assert world.transfers.adapter_pages_loaded == 5
    assert world.transfers.load_seconds.count == 1
    world.check()
    world.check_bytes()


def test_followed_kv_is_part_of_the_match() -> None:
    world = World(12, 30)
    stored(world, (0, 1, 0, 1))
    world.settle()
    world.tree.evict(12)
    world.rates.meter.current = replace(world.rates.meter.current, prefill_s_per_token=1.0)
    request = world.enqueue(None, (0, 1, 0, 1))
    assert request
    world.step()
    assert request.cached == 4
    world.check()
    world.copier.drain()
    world.transfers.poll()
    world.check()


def test_kv_computed_anew_while_its_copy_is_under_way_belongs_to_that_forward() -> None:
    world = World(20, 30)
    stored(world, (0, 1, 0, 1))
    world.settle()
    world.tree.evict(20)
    node = world.tree.peek(world.tree.base, tokens_of((0, 1, 0, 1)))[0]
    assert world.tree.promote(node)
    world.transfers.load(node)
    request = world.enqueue(None, (0, 1, 0, 1))
    assert request
    assert world.start(request)
    assert request.cached == 0
    world.finish(0)
    assert node.last_forward == world.ledger.forwards
    world.check()
    world.settle()


def test_pages_of_a_followed_load_that_leave_are_filled_again_behind_it() -> None:
    world = cold_in_a_pool_with_free_pages()
    world.register(1, 5)
    world.settle()
    request = world.enqueue(0, (1,))
    assert request
    world.tiers.step([request.wish])
    assert world.prefetch.may_start(request.wish)
    pages = list(world.nodes[0].pages)
    world.tree.trim(world.nodes[0])
    world.tree.load(world.nodes[1])
    assert world.nodes[1].pages == pages
    world.transfers.load(world.nodes[1])
    world.check()
    world.queue.clear()
    world.copier.drain()
    world.transfers.poll()
    world.check()
    world.check_bytes()


def test_how_far_a_load_is_from_landing() -> None:
    world = World(30, 30)
    for number, size in enumerate((5, 3, 4)):
        world.register(number, size)
        world.settle()
    first, second, third = world.nodes.values()
    for node in (first, second):
        world.tree.load(node)
        world.transfers.load(node)
    world.tree.load(third)  # its copy has not begun
    transfers = world.transfers
    assert transfers.pages_until_landed([first]) == 5
    assert transfers.pages_until_landed([second]) == 8
    assert transfers.pages_until_landed([second, first]) == 8
    assert transfers.pages_until_landed([]) == 0
    assert transfers.pages_until_landed([first, third]) is None
    with pytest.raises(AssertionError, match="no load into node"):
        transfers.follow([third])


def test_a_write_back_comes_after_the_forward_that_wrote_its_pages() -> None:
    world = World(20, 30)
    world.enqueue(None, (0, 1))
    world.step()
    world.finish(0)
    world.tiers.step([])
    assert world.transfers.pages_under_way(Way.STORE) == 2
    assert not world.copier.advance("store"), "the forward has not run"
    world.settle()
    world.check()


def test_pages_of_several_victims_say_the_last_of_their_forwards() -> None:
    world = World(20, 1)
    for run in ((0,), (1,)):
        world.enqueue(None, run)
        world.step()
        world.finish(0)
    old, late = (world.tree.peek(world.tree.base, tokens_of(run))[0] for run in ((0,), (1,)))
    assert (old.last_forward, late.last_forward) == (1, 2)
    # What was used last leaves first: the later forward is not the last one that is looked at.
    old.last_use, late.last_use = late.last_use, old.last_use
    world.tree.reprice()
    pages = [*old.pages, *late.pages]
    assert world.tree.evict(2) == 2
    assert [world.ledger.last_forward([page]) for page in pages] == [2, 2]


def test_kv_computed_anew_while_it_is_on_the_host_belongs_to_that_forward() -> None:
    world = World(20, 30)
    stored(world, (0, 1, 0, 1))
    world.settle()
    world.tree.evict(20)
    (node,) = world.tree.peek(world.tree.base, tokens_of((0, 1, 0, 1)))
    request = world.enqueue(None, (0, 1, 0, 1))
    assert request
    assert world.start(request)
    world.finish(0)
    assert node.pages
    assert node.last_forward == world.ledger.forwards
    world.check()
    world.settle()
