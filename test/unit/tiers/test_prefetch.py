"""Who is let through, who waits for what and for how long, in a pool with a clock of our own."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers_tiers import PAGE_BYTES, Request, World, tokens_of

from sglang_graft.cache import AdapterNode, Node, State
from sglang_graft.pool import Owner
from sglang_graft.tiers import IdlePromotion

NEVER = -1.0


def world_with(pages: int, host_pages: int, *sizes: int, **prefetch: float) -> World:
    """No forward waits for a copy unless `follow_seconds` says so."""
    world = World(pages, host_pages, **{"follow_seconds": NEVER} | prefetch)
    for number, size in enumerate(sizes):
        world.register(number, size)
        world.settle()
    return world


def run(world: World, request: Request | None, passes: int = 10) -> int:
    """Serve until the request has started; how many passes it took."""
    assert request is not None
    for count in range(1, passes + 1):
        world.step()
        world.check()
        if request in world.running:
            return count
        world.copier.drain()
    raise AssertionError(f"{request.key} has not started in {passes} passes")


def finish_all_running(world: World) -> None:
    while world.running:
        world.finish(0)


def finish_all(world: World) -> None:
    finish_all_running(world)
    world.settle()


def test_a_cold_adapter_waits_for_its_copy_alone() -> None:
    world = world_with(20, 20, 3)
    cold, base = world.enqueue(0, (1, 1)), world.enqueue(None, (0,))
    world.step()
    assert world.running == [base], "the request behind it is not held up"
    assert world.nodes[0].state is State.LOADING
    world.step()
    assert cold in world.queue, "its bytes have not landed"
    world.copier.drain()
    assert run(world, cold) == 1
    world.settle()
    world.check()


def test_a_cold_adapter_starts_in_its_first_pass_when_its_copy_is_short() -> None:
    world = world_with(40, 40, 3, 4, follow_seconds=1.0)
    cold, base = world.enqueue(0, (1, 1)), world.enqueue(None, (0,))
    world.step()
    assert world.running == [cold, base]
    assert world.counters.total.passes_waited == 0
    world.check()
    world.settle()


def test_a_forward_waits_for_so_many_copies_and_no_more() -> None:
    size = 3
    one = World(40, 40).rates.meter.load_seconds(size * PAGE_BYTES)
    world = world_with(40, 40, size, size, size, follow_seconds=2.5 * one)
    world.rates.meter.smallest_copy = 1 << 40  # the price of a copy stays
    requests = [world.enqueue(number, (1,)) for number in range(3)]
    world.step()
    assert world.running == requests[:2]
    world.check()
    world.copier.drain()
    assert run(world, requests[2]) == 1
    world.settle()


def test_who_lost_its_load_within_a_pass_does_not_start() -> None:
    world = world_with(40, 40, 3, follow_seconds=1.0)
    request = world.enqueue(0, (1,))
    assert request
    world.tiers.step([request.wish])
    world.tree.trim(world.nodes[0])
    assert not world.prefetch.may_start(request.wish)
    world.check()
    assert run(world, request) == 1
    world.settle()


def test_fifty_first_uses_are_one_load() -> None:
    world = world_with(300, 20, 3)
    requests = [world.enqueue(0, (1, 1)) for _ in range(50)]
    for request in requests:
        run(world, request)
    assert world.counters.total.loads == 1
    assert world.store.reads == 0, "its image was kept when it was registered"
    assert world.counters.of("adapter 0").hits_host == 50


def test_an_image_that_the_host_let_go_is_read_once_more() -> None:
    world = world_with(40, 4, 3, 3)
    assert world.nodes[0].host is None, "the second took its room"
    requests = [world.enqueue(0, (1, 1)) for _ in range(5)]
    world.step()
    world.step()
    assert len(world.executor.jobs) == 1
    world.settle()
    for request in requests:
        run(world, request)
    assert world.counters.of("adapter 0").disk_reads == 1
    assert world.counters.of("adapter 0").hits_disk == 5


@pytest.mark.parametrize("kind", ["missing", "changed"])
def test_a_read_that_fails_ends_those_who_waited_for_it(kind: str) -> None:
    world = world_with(20, 4, 3, 3)
    getattr(world.disk, kind).add(0)
    waiting, base = [world.enqueue(0, (1,)) for _ in range(3)], world.enqueue(None, (0,))
    world.step()
    assert base in world.running
    world.settle()
    world.step()
    failed = [entry for entry in world.log if entry[0] == "failed"]
    assert [entry[1] for entry in failed] == [r.key for r in waiting if r]
    assert all(("gone" if kind == "missing" else "load_inplace") in entry[2] for entry in failed)
    getattr(world.disk, kind).clear()
    later = world.enqueue(0, (1,))
    world.step()
    world.settle()
    run(world, later)
    world.check()


def test_a_stream_of_hot_requests_lets_the_cold_one_through() -> None:
    patience = 3
    world = world_with(12, 30, 5, 6, patience=patience)
    run(world, world.enqueue(0, (0,)))
    cold = world.enqueue(1, (1,))
    assert cold
    for _ in range(40):
        for _ in range(3):
            world.enqueue(0, (0,))  # one of them could always run at once
        world.step()
        world.copier.drain()
        world.check()
        assert world.prefetch.overtaken(cold.key) <= patience
        if cold in world.running:
            return
        if len(world.running) > 1 or world.prefetch.overtaken(cold.key) == patience:
            world.finish(0)
    raise AssertionError("the cold request has not started")


def test_a_pool_for_one_adapter_serves_all_in_turn() -> None:
    world = world_with(9, 30, 5, 5, 5)
    requests = [world.enqueue(number, (number,)) for number in (0, 1, 2, 0, 1, 2)]
    for _ in range(60):
        world.step()
        world.copier.drain()
        world.check()
        world.finish(0)
    assert not world.queue
    assert not world.running
    assert len(requests) == 6


@pytest.mark.parametrize(("pages", "adapters"), [(9, 2), (12, 3)])
def test_overdue_requests_do_not_take_the_pool_from_each_other(pages: int, adapters: int) -> None:
    world = world_with(pages, 60, *[5] * adapters, patience=2)
    cold = [world.enqueue(number, (1,)) for number in range(adapters)]
    for node in world.nodes.values():
        assert world.tree.host
        world.tree.host.release(node)
    for _ in range(4):  # their images are read meanwhile
        run(world, world.enqueue(None, (0,)))
        finish_all_running(world)
    assert all(request and world.prefetch.overtaken(request.key) > 2 for request in cold)
    world.settle()
    for request in cold:
        run(world, request, passes=5)
        world.finish(0)
    assert world.counters.total.loads == adapters, "each was loaded once"


def test_no_read_blocks_those_behind_it_however_far_back_it_waits() -> None:
    world = world_with(40, 3, 3, 3, 3, lookahead=1, patience=1)
    reading, behind = world.enqueue(0, (1,)), world.enqueue(1, (1,))
    for _ in range(6):
        assert run(world, world.enqueue(None, (0,))) == 1
    assert behind
    assert world.prefetch.overtaken(behind.key) == 6
    assert world.nodes[1].host is None, "its own read begins when it is the first in line"
    for request in (reading, behind):
        world.settle()
        run(world, request)


def test_kv_comes_back_with_its_adapter() -> None:
    world = world_with(20, 40, 3)
    run(world, world.enqueue(0, (1, 0, 1)))
    finish_all(world)
    world.tree.evict(20)
    assert (world.nodes[0].state, world.nodes[0].host_kv_pages) == (State.ABSENT, 3)
    again = world.enqueue(0, (1, 0, 1, 1))
    run(world, again)
    assert again
    assert again.cached == 3, "three pages came from the host"
    assert world.counters.total.promotions == 1
    assert world.counters.of("adapter 0").tokens_host == 6
    world.settle()


def test_a_request_waits_for_its_kv_alone() -> None:
    world = world_with(20, 40)
    run(world, world.enqueue(None, (1, 0, 1)))
    finish_all(world)
    world.tree.evict(20)
    waiting, other = world.enqueue(None, (1, 0, 1, 1)), world.enqueue(None, (0,))
    world.step()
    assert (world.queue, world.running) == ([waiting], [other])
    world.copier.drain()
    assert run(world, waiting) == 1
    assert waiting
    assert waiting.cached == 3


def in_a_full_pool(*runs: tuple[int, ...]) -> tuple[World, list[Request]]:
    """Requests that wait for room, with the KV of `runs` on the host."""
    world = world_with(12, 60)
    for tokens in runs:
        run(world, world.enqueue(None, tokens))
        finish_all(world)
    world.tree.evict(20)
    run(world, world.enqueue(None, (0,) * 10))
    waiting = [world.enqueue(None, (*tokens, 1)) for tokens in runs]
    return world, [request for request in waiting if request is not None]


def test_kv_that_found_no_room_comes_when_there_is_some() -> None:
    world, (waiting,) = in_a_full_pool((1, 0, 1))
    for _ in range(5):
        world.step()
        world.check()
        world.copier.drain()
        assert waiting in world.queue
    assert world.counters.total.promotions == 0
    finish_all_running(world)
    run(world, waiting)
    assert waiting.cached == 3, "its passes were not used up while there was no room"


def test_a_full_pool_is_tried_by_one_of_all_that_wait() -> None:
    world, waiting = in_a_full_pool((1, 0, 1), (2, 0, 1), (3, 0, 1))
    tried: list[int] = []
    promote = world.tree.promote

    def counting(node: Node, **how: bool) -> list[int] | None:
        tried[-1] += 1
        return promote(node, **how)

    world.tree.promote = counting  # type: ignore[method-assign]
    for _ in range(6):
        tried.append(0)
        world.step()
        world.check()
    assert all(request in world.queue for request in waiting)
    # Each once without what any other wants, and once without what those before it want.
    assert tried == [6, 6, 2, 2, 2, 2]


def test_adapters_that_find_no_room_are_tried_once_for_all_that_are_as_large() -> None:
    world = world_with(14, 60, 4, 4, 5, 3)
    world.tree.evict(20)
    run(world, world.enqueue(None, (0,) * 11))  # two pages are left beside it
    for number in (0, 1, 2, 3):
        world.enqueue(number, (1,))
    tried: list[int] = []
    load = world.tree.load

    def counting(node: AdapterNode, **how: Any) -> list[int] | None:
        tried.append(node.weight_pages)
        return load(node, **how)

    world.tree.load = counting  # type: ignore[method-assign]
    for _ in range(2):
        tried.clear()
        world.step()
        assert tried == [4, 3], "4 and 5 pages find no room where 4 did not"
        world.check()
    for _ in range(20):
        finish_all(world)
        world.step()
    assert not world.queue


def test_who_was_overtaken_too_often_still_gets_its_kv_from_the_host() -> None:
    world = world_with(14, 60, 4, patience=1)
    run(world, world.enqueue(0, (1, 0, 1)))
    finish_all(world)
    world.tree.evict(20)
    run(world, world.enqueue(None, (0,) * 9))  # beside it an adapter of 4 pages has no room
    waiting = world.enqueue(0, (1, 0, 1, 1))
    assert waiting is not None
    for _ in range(3):
        world.enqueue(None, (1,))
        world.step()
        world.check()
        if len(world.running) > 1:
            world.finish(1)
        world.copier.drain()
    assert world.prefetch.overtaken(waiting.key) >= 1
    assert waiting in world.queue
    finish_all_running(world)
    run(world, waiting)
    assert waiting.cached == 3


def test_kv_that_left_again_while_its_request_waited_is_brought_again() -> None:
    world = world_with(20, 60)
    run(world, world.enqueue(None, (1, 0, 1)))
    finish_all(world)
    world.tree.evict(20)
    waiting = world.enqueue(None, (1, 0, 1, 1))
    assert waiting is not None
    for _ in range(4):  # it is looked at, and does not start
        world.tiers.step([waiting.wish])
        world.copier.drain()
        assert on_device(world, (1, 0, 1)) == 3
        world.tree.evict(20)
        world.check()
    run(world, waiting)
    assert waiting.cached == 3


def on_device(world: World, run: tuple[int, ...]) -> int:
    """Pages of the prefix that are on the device, or on their way."""
    return sum(len(node.pages) for node in world.tree.peek(world.tree.base, tokens_of(run)))


def test_kv_of_the_first_in_the_queue_takes_the_room_of_what_later_ones_want() -> None:
    world = world_with(12, 60)
    for tokens in ((1, 0, 1), (2, 0, 1)):
        run(world, world.enqueue(None, tokens))
        finish_all(world)
    world.tree.evict(20)
    run(world, world.enqueue(None, (2, 0, 1, 1)))
    finish_all_running(world)
    run(world, world.enqueue(None, (0,) * 6))
    assert (on_device(world, (1, 0, 1)), on_device(world, (2, 0, 1))) == (0, 3)
    assert world.ledger.free - 1 < 3, "there is no room for both"
    for tokens in ((1, 0, 1, 0), (2, 0, 1, 0)):
        world.enqueue(None, tokens)
    world.tiers.step([request.wish for request in world.queue])
    assert on_device(world, (1, 0, 1)) == 3
    world.check()


def test_what_a_waiting_request_wants_is_as_young_as_any() -> None:
    world = world_with(40, 60)
    for tokens in ((1, 0), (2, 0), (3, 0)):
        run(world, world.enqueue(None, tokens))
        finish_all(world)
    world.settle()
    waiting = world.enqueue(None, (1, 0, 3))
    assert waiting is not None
    world.tree.match(world.tree.base, tokens_of((4,)))  # time goes on
    world.tiers.step([waiting.wish])
    seen = world.tree.peek(world.tree.base, tokens_of((1, 0)))[-1]
    value = world.tree.policy.value(seen)
    world.tree.match(world.tree.base, tokens_of((4,)))
    world.tiers.step([waiting.wish])
    assert world.tree.policy.value(seen) == value, "when it comes, not as long as it waits"
    world.tree.evict(world.tree.base.kv_pages - 2)
    assert [on_device(world, tokens) for tokens in ((1, 0), (2, 0), (3, 0))] == [2, 0, 0]
    world.check()


def test_kv_that_is_cheaper_to_compute_stays() -> None:
    class Slow:
        def load_seconds(self, nbytes: int) -> float:
            return 1.0

        def prefill_seconds(self, tokens: int, depth: int) -> float:
            return 0.5

    world = world_with(20, 40)
    world.prefetch.rates = Slow()
    run(world, world.enqueue(None, (1, 0, 1)))
    finish_all(world)
    world.tree.evict(20)
    again = world.enqueue(None, (1, 0, 1, 1))
    assert run(world, again) == 1
    assert again
    assert again.cached == 0


def test_what_another_request_waits_for_is_no_victim() -> None:
    world = world_with(14, 30, 5, 5, 5)
    for number in (0, 1):
        run(world, world.enqueue(number, (number,)))
        finish_all(world)
    # Adapters 0 and 1 fill the pool and nobody holds them; a third would push out the older.
    third, first = world.enqueue(2, (1,)), world.enqueue(0, (0, 1))
    world.step()
    assert first in world.running
    assert third in world.queue
    assert world.nodes[0].state is State.RESIDENT
    assert world.nodes[1].state is State.ABSENT, "what nobody wants makes room"


def test_the_reserve_is_never_taken() -> None:
    world = world_with(20, 30, 5)
    world.ledger.take(12, Owner.KV_RUNNING)
    world.ledger.reserve = 4
    wish = world.enqueue(0, (1,))
    assert wish
    world.tiers.step([wish.wish])
    assert world.nodes[0].state is State.ABSENT
    world.ledger.reserve = 3
    world.tiers.step([wish.wish])
    assert world.nodes[0].state is State.LOADING


def test_requests_further_back_begin_no_loads() -> None:
    world = world_with(30, 30, 3, 3, lookahead=1)
    world.enqueue(0, (1,))
    world.enqueue(1, (1,))
    world.step()
    assert world.nodes[0].state is State.LOADING
    assert world.nodes[1].state is State.ABSENT


@pytest.mark.parametrize("moment", ["reading", "filling", "copying", "landed"])
def test_unload_during_a_load(moment: str) -> None:
    world = world_with(20, 6, 3, 5)  # the second took the first one's room on the host
    world.enqueue(0, (1,))
    world.step()
    steps: dict[str, Callable[[], object]] = {
        "filling": lambda: (world.executor.advance(), world.step()),
        "copying": lambda: (world.executor.advance(), world.step()),
        "landed": lambda: (world.copier.drain(), world.transfers.poll()),
    }
    for name, act in steps.items():
        if moment in ("reading", *list(steps)[: list(steps).index(name)]):
            break
        act()
    world.unload(0)
    world.check()
    world.settle()
    world.check()
    assert world.tiers.at_rest
    assert world.ledger.free == world.ledger.total
    held = sum(len(node.host.pages) for node in world.tree.adapters() if node.host)
    assert world.host.free == world.host.total - held


def test_a_flush_during_a_load_loses_no_page() -> None:
    world = world_with(20, 20, 3)
    run(world, world.enqueue(0, (1, 0)))
    world.finish(0)
    world.step()  # a write-back begins
    world.tree.evict(5)
    request = world.enqueue(0, (1, 0))
    assert request
    world.step()
    world.abort(0)
    world.flush()
    world.check()
    assert world.ledger.free == world.ledger.total
    world.settle()
    world.check()
    assert world.host.free == world.host.total - 3, "the image stays"


def test_an_abort_during_a_load_leaves_the_load_alone() -> None:
    world = world_with(20, 20, 3)
    world.enqueue(0, (1,))
    world.step()
    world.abort(0)
    world.settle()
    assert world.nodes[0].state is State.RESIDENT
    world.check()


def test_idle_promotion_uses_free_pages_only() -> None:
    world = world_with(14, 40, 3, 3, 3)
    run(world, world.enqueue(0, (1, 0)))
    finish_all(world)
    world.tree.evict(14)
    world.tiers.idle = IdlePromotion(world.tree, world.transfers, world.counters)
    for _ in range(12):
        world.step()
        world.copier.drain()
        world.check()
    states = [world.nodes[number].state for number in range(3)]
    assert states == [State.RESIDENT] * 3
    assert world.nodes[0].kv_pages == 2, "the latest used adapter's KV came back as well"
    assert world.tree.evicted_adapters == 1


def test_a_load_soon_after_an_eviction_counts_as_thrash() -> None:
    world = world_with(20, 20, 3)
    run(world, world.enqueue(0, (1,)))
    assert world.counters.total.thrash == 0
    finish_all(world)
    world.tree.evict(20)
    run(world, world.enqueue(0, (0,)))
    assert world.counters.of("adapter 0").thrash == 1


def test_waiting_is_counted_in_seconds_until_the_request_may_start() -> None:
    world = world_with(20, 20, 3)
    now = iter(range(10, 1000, 10))
    world.prefetch.now = lambda: float(next(now))
    request = world.enqueue(0, (1, 1))
    run(world, request)
    assert world.counters.total.seconds_waited == 10.0
    assert world.counters.of("adapter 0").seconds_waited == 10.0
    assert world.counters.total.passes_waited == 1


def test_an_adapter_that_was_unloaded_is_counted_no_more() -> None:
    world = world_with(20, 20, 3)
    world.enqueue(0, (1, 1))
    world.step()
    world.unload(0)
    world.step()
    assert "adapter 0" not in world.counters.by_adapter
    assert world.counters.total.passes_waited == 1
    world.check()


def test_no_forward_waits_for_the_load_of_who_is_held_back() -> None:
    world = world_with(40, 40, 3, follow_seconds=1.0)
    request = world.enqueue(0, (1,))
    assert request
    world.tiers.step([request.wish])
    world.prefetch._blocker = "one before it"
    assert not world.prefetch.may_start(request.wish)
    assert world.nodes[0].state is State.LOADING
    world.settle()
