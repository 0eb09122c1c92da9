"""Images that have to be read again, from whichever folder still holds the weights."""

from pathlib import Path

import pytest
from helpers_tiers import World

from sglang_graft.cache import AdapterNode, State
from sglang_graft.cache.departures import Reason

FOLDERS = (0, 7, 8)


def world_with_copies() -> World:
    """Adapter 0 was registered from three folders, and is on disk alone."""
    world = World(20, 4)
    for number in (0, 1):
        world.register(number, 3)
        world.settle()
    assert world.nodes[0].host is None, "the second took its room"
    world.disk.copies = dict.fromkeys(FOLDERS, 0)
    world.images.sources = lambda node: [(f"name {n}", Path(str(n))) for n in FOLDERS]
    return world


def outcome(world: World) -> list[str]:
    """What a request for adapter 0 was told when it failed; nothing when it runs."""
    request = world.enqueue(0, (1,))
    assert request
    for _ in range(12):
        world.step()
        world.check()
        if request in world.running:
            return []
        if request not in world.queue:
            return [entry[2] for entry in world.log if entry[:2] == ("failed", request.key)]
        world.copier.drain()
        world.executor.advance()
    raise AssertionError(f"{request.key} neither runs nor has failed")


@pytest.mark.parametrize("kind", ["missing", "changed"])
def test_a_folder_that_went_bad_takes_nothing_from_equal_weights(kind: str) -> None:
    world = world_with_copies()
    getattr(world.disk, kind).update((0, 7))
    assert outcome(world) == []
    assert world.nodes[0].state is State.RESIDENT
    counts = world.counters.of("adapter 0")
    assert (counts.disk_reads, counts.failed_reads) == (3, 2)
    assert world.images.failed == 0, "no adapter failed"
    world.settle()  # compares the bytes


def test_a_request_fails_when_every_folder_has_and_the_next_one_tries_all_again() -> None:
    world = world_with_copies()
    world.disk.missing.update(FOLDERS)
    assert outcome(world) == ["8 is gone"]
    assert world.images.failed == 1
    world.disk.missing.remove(7)
    assert outcome(world) == []
    assert world.counters.of("adapter 0").failed_reads == 4


def test_an_unload_between_two_folders_ends_the_search() -> None:
    world = world_with_copies()
    world.disk.missing.update(FOLDERS)
    world.enqueue(0, (1,))
    for _ in range(2):
        world.step()
        world.executor.advance()
    world.unload(0)
    world.settle()
    world.check()
    assert world.tiers.at_rest


def pin(world: World, number: int) -> AdapterNode:
    node = world.nodes[number]
    assert world.tree.load(node, reason=Reason.PIN)
    world.tree.lock(node)
    world.tiers.pinned = lambda: [node]
    return node


def test_a_pinned_adapter_whose_read_failed_is_read_again_when_it_is_asked_for() -> None:
    world = world_with_copies()
    world.images.sources = lambda node: []
    node = pin(world, 0)
    world.disk.missing.add(0)
    for _ in range(6):
        world.step()
        world.check()
        world.executor.advance()
    assert world.counters.of("adapter 0").disk_reads == 1, "nobody asks"
    assert outcome(world) == ["0 is gone"]
    assert world.counters.of("adapter 0").disk_reads == 2
    world.disk.missing.clear()
    assert outcome(world) == []
    assert (node.state, world.images.failure(node)) == (State.RESIDENT, None)


def test_the_image_of_a_pinned_adapter_stays_until_its_copy_has_begun() -> None:
    world = World(20, 3)
    for number in (0, 1, 2):
        world.register(number, 3)
        world.settle()
    node = pin(world, 0)
    other = world.enqueue(1, (1,))
    for jobs in (1, 2, 1):  # its read; its way into the host pool, and the other read with it
        world.step()
        for _ in range(jobs):
            world.executor.advance()
    for _ in range(2):
        world.step()
        world.check()
        world.copier.drain()
    assert node.state is State.RESIDENT
    assert world.counters.of("adapter 0").disk_reads == 1
    for _ in range(4):
        world.settle()
        world.step()
    assert other in world.running
