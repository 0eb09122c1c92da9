"""Loads for waiting requests count for their tenants, and a cap keeps nobody else waiting."""

import dataclasses

from helpers_tiers import Request, World

from sglang_graft.cache import State
from sglang_graft.cache.shares import Share


def world_of(pages: int, *sizes: int) -> World:
    world = World(pages, 40, follow_seconds=-1.0)  # no forward waits for a copy
    for number, size in enumerate(sizes):
        world.register(number, size)
        world.settle()
    return world


def wish(world: World, number: int, share: Share) -> Request:
    request = world.enqueue(number, (number,))
    assert request is not None
    request.wish = dataclasses.replace(request.wish, share=share)
    return request


def test_an_adapter_counts_for_the_tenant_that_asked() -> None:
    world = world_of(30, 5)
    share = world.tree.shares.get("a")
    wish(world, 0, share)
    world.step()
    assert world.nodes[0].share is share
    assert share.held == 5
    world.settle()
    world.check()


def test_who_waits_for_its_own_cap_holds_nobody_up() -> None:
    world = world_of(40, 5, 5, 3)
    a, b = world.tree.shares.get("a"), world.tree.shares.get("b")
    world.tree.shares.limit({"a": (0, 7)})
    wish(world, 0, a)
    world.step()
    world.settle()
    world.tree.lock(world.nodes[0])  # a's running request
    waiting, others = wish(world, 1, a).wish, wish(world, 2, b).wish
    for passes in range(3 * world.prefetch.patience):
        world.tiers.step([waiting, others])
        assert not world.prefetch.may_start(waiting)
        assert world.prefetch.may_start(others) is (passes > 0), "after its own copy, in every pass"
        world.copier.drain()
    assert world.nodes[1].state is State.ABSENT
    world.tree.unlock(world.nodes[0])
    world.tiers.step([waiting, others])
    assert world.nodes[1].state is State.LOADING, "its own tenant's cold adapter made room"
    assert world.nodes[0].state is State.ABSENT
    assert world.nodes[2].state is State.RESIDENT
    world.tree.check_invariants()


def test_a_flood_of_loads_leaves_a_floor_alone() -> None:
    world = world_of(16, 5, 5, 5, 4)
    a, b = world.tree.shares.get("a"), world.tree.shares.get("b")
    world.tree.shares.limit({"b": (4, None)})
    wish(world, 3, b)
    world.step()
    world.settle()
    world.queue.clear()  # b's request has gone; what it brought stays
    for _ in range(4):
        for number in (0, 1, 2):
            world.tiers.step([wish(world, number, a).wish])
            world.copier.drain()
            assert world.nodes[3].state is not State.ABSENT
            assert b.held >= 4
    assert world.tree.evicted_adapters >= 9, "a's adapters made room for each other"
