"""Bringing adapters nearer that no request waits for."""

import pytest
from helpers_tiers import World

from sglang_graft.cache import State
from sglang_graft.tiers import Step, look_ahead, to_device, to_host


def world(*sizes: int, pages: int = 12, host_pages: int = 40) -> World:
    """Adapters 0, 1, ... of these sizes, their images in the host pool."""
    made = World(pages, host_pages)
    for number, size in enumerate(sizes):
        made.register(number, size)
        settle(made)
    return made


def settle(made: World) -> None:
    """Every read, fill and copy that was begun ends."""
    for _ in range(4):
        while made.executor.advance():
            pass
        made.step()
        made.copier.drain()
    check(made)


def check(made: World) -> None:
    made.tree.check_invariants()
    made.tiers.check_invariants()
    made.ledger.check_invariants()


def warm(made: World, number: int) -> Step:
    """Step by step to the device."""
    node = made.nodes[number]
    step = to_device(made.tiers, node, made.images.failed)
    for _ in range(5):
        check(made)
        if step is not Step.COMING:
            break
        settle(made)
        step = to_device(made.tiers, node, made.images.failed)
    return step


def test_an_image_goes_to_the_device_in_two_steps() -> None:
    made = world(4)
    node = made.nodes[0]
    assert to_device(made.tiers, node, 0) is Step.COMING
    assert node.state is State.LOADING
    assert to_device(made.tiers, node, 0) is Step.COMING
    settle(made)
    assert to_device(made.tiers, node, 0) is Step.DONE
    assert (node.loads, made.counters.of(node.identity).loads) == (1, 1)


def test_an_image_that_left_is_read_again() -> None:
    made = world(4)
    node = made.nodes[0]
    assert made.tree.host is not None
    made.tree.host.release(node)
    assert to_host(made.tiers, node, 0) is Step.COMING
    assert to_host(made.tiers, node, 0) is Step.COMING, "many calls are one read"
    settle(made)
    assert to_host(made.tiers, node, 0) is Step.DONE
    assert made.counters.of(node.identity).disk_reads == 1
    assert node.state is State.ABSENT
    made.tree.host.release(node)
    assert warm(made, 0) is Step.DONE


def test_an_image_that_cannot_be_read_says_why_to_those_who_waited() -> None:
    made = world(4)
    node = made.nodes[0]
    assert made.tree.host is not None
    made.tree.host.release(node)
    made.disk.missing.add(0)
    assert to_device(made.tiers, node, 0) is Step.COMING
    settle(made)
    with pytest.raises(ValueError, match="is gone"):
        to_device(made.tiers, node, 0)
    made.disk.missing.clear()
    assert to_device(made.tiers, node, made.images.failed) is Step.COMING, "asked anew"


def test_promised_pages_are_not_taken() -> None:
    made = world(6, 6)
    made.running = []
    assert warm(made, 0) is Step.DONE
    made.ledger.reserve = 7
    assert to_device(made.tiers, made.nodes[1], 0) is Step.NO_ROOM
    assert look_ahead(made.tiers, 6).missing == 1
    assert made.nodes[0].state is State.RESIDENT, "nothing left in vain"
    made.ledger.reserve = 6
    found = look_ahead(made.tiers, 6)
    assert [(loss.node, loss.pages) for loss in found.losses] == [(made.nodes[0], 6)]
    assert to_device(made.tiers, made.nodes[1], 0) is Step.COMING
    assert made.nodes[0].state is State.ABSENT
    check(made)


def test_what_a_waiting_request_wants_does_not_leave() -> None:
    made = world(6, 6, 6)
    assert warm(made, 0) is Step.DONE
    assert warm(made, 1) is Step.DONE
    request = made.enqueue(0, (1,))
    assert request is not None
    made.prefetch.consider([request.wish])
    found = look_ahead(made.tiers, 6)
    assert [loss.node for loss in found.losses] == [made.nodes[1]], "0 is older, and wanted"
    assert to_device(made.tiers, made.nodes[2], 0) is Step.COMING
    assert made.nodes[0].state is State.RESIDENT
    check(made)
