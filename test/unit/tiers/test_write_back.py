"""What is copied to the host, in which order, and when copies make room for it."""

from helpers_tiers import World, tokens_of

from sglang_graft.cache import Node


def serve(world: World, *runs: tuple[int, ...]) -> None:
    for run in runs:
        world.enqueue(None, run)
        world.step()
        world.finish(0)
        world.copier.drain()


def test_everything_is_copied_while_the_host_has_room() -> None:
    world = World(40, 40)
    serve(world, (0, 0), (0, 1, 1), (1,))
    world.settle()
    assert world.tree.base.host_kv_pages == world.tree.base.kv_pages == 5
    world.tree.evict(40)
    assert world.tree.base.kv_pages == 0
    assert world.tree.dropped_pages == 0
    world.check()


def test_only_what_is_about_to_leave_is_copied_to_a_full_host() -> None:
    world = World(40, 4)
    assert world.tiers.write_back
    world.tiers.write_back.ahead = 4
    serve(world, (0, 0, 0), (1, 0), (1, 1, 1), (0, 1, 1, 1))
    world.settle()
    assert world.tree.base.host_kv_pages <= 4
    copied = [node for node in world.tree.coldest(10) if node.host]
    assert copied == list(world.tree.coldest(10))[: len(copied)], "the coldest ones have the copies"
    world.check()


def test_copies_under_way_are_bounded() -> None:
    world = World(60, 60)
    for run in ((0,) * 5, (1,) * 5, (2,) * 5):
        world.enqueue(None, run)
        world.step()
        world.finish(0)
    for _ in range(5):
        world.tiers.step([])
        assert 0 < world.tiers.report()["pages_storing"] <= 8
    world.settle()
    assert world.tree.base.host_kv_pages == 15


def test_a_pass_keeps_up_with_what_came_in_since_the_last_one() -> None:
    world = World(60, 60)
    for run in ((0,) * 5, (1,) * 5, (2,) * 5, (3,) * 5):
        world.enqueue(None, run)
    world.step()
    for _ in range(4):
        world.finish(0)
    world.tiers.step([])  # a long forward filled 20 pages; 8 are allowed otherwise
    assert world.tiers.report()["pages_storing"] == 20
    world.check()
    world.settle()
    # Nothing came in since: what is left over of a burst goes on in small parts.
    assert world.tree.base.host_kv_pages == 20
    assert world.tiers.write_back is not None
    for run in ((4,) * 5, (5,) * 5, (6,) * 5):
        world.enqueue(None, run)
        world.step()
        world.finish(0)
    world.tiers.write_back._inserted = world.tree.inserted_pages
    world.tiers.step([])
    assert 0 < world.tiers.report()["pages_storing"] <= 8


def test_what_came_in_is_copied_before_a_load_may_evict_it() -> None:
    world = World(20, 40)
    world.register(0, 14)
    world.settle()
    world.tree.evict(20)  # its weights are on the host alone
    world.enqueue(None, (0,) * 8)
    world.step()
    world.finish(0)
    world.enqueue(0, (1,))
    world.step()  # the first pass since: the load takes pages of the answer that has just ended
    assert world.nodes[0].pages
    assert world.tree.demoted_pages
    assert world.tree.dropped_pages == 0
    world.check()
    world.settle()
    world.check()


def test_an_image_that_a_request_waits_for_is_not_displaced() -> None:
    world = World(8, 5, lookahead=1, follow_seconds=-1.0)
    for number in range(3):
        world.register(number, 2 + number)
        world.settle()
    for number in range(3):
        world.enqueue(number, (0,))
    world.enqueue(None, (0,))
    world.step()
    for _ in range(30):  # each answer is KV that would like to have a copy
        world.settle()
        world.step()
        world.check()
        world.finish(0)
    assert not world.queue
    world.check()


def test_pages_that_come_back_are_not_new() -> None:
    world = World(40, 40)
    serve(world, (0, 1, 2))
    assert world.tree.inserted_pages == 3
    serve(world, (0, 1, 2), (0, 1, 2, 3))
    assert world.tree.inserted_pages == 4
    world.settle()
    world.tree.evict(40)
    serve(world, (0, 1, 2, 3))
    assert world.tree.inserted_pages == 4, "the host had all of it"


def test_a_node_larger_than_the_bound_is_copied_alone() -> None:
    world = World(60, 60)
    serve(world, (0,) * 20)
    world.settle()
    assert world.tree.base.host_kv_pages == 20


def test_the_path_is_copied_before_its_end() -> None:
    world = World(40, 40)
    serve(world, (0, 0), (0, 0, 1), (0, 0, 1, 1))
    world.settle()
    path = world.tree.peek(world.tree.base, tokens_of((0, 0, 1, 1)))
    assert len(path) == 3
    assert all(node.host for node in path)


def kept_while_copied(world: World, node: Node) -> None:
    """An adapter retires while a request holds KV that is being copied, and the request ends."""
    world.tree.lock(node)
    world.tree.trim(node.adapter)
    assert node.host is None
    assert node.pages
    world.tree.unlock(node)
    assert world.transfers.has(node)
    world.tiers.step([])
    world.check()
    world.settle()
    assert node.host is not None, "it is copied when the other copy has ended"
    world.check()


def test_kv_is_not_copied_twice_at_once() -> None:
    world = World(40, 40)
    world.register(0, 3)
    world.settle()
    world.enqueue(0, (0, 1))
    world.step()
    world.finish(0)
    world.tiers.step([])
    (node,) = world.tree.peek(world.nodes[0], tokens_of((0, 1)))
    kept_while_copied(world, node)


def test_kv_whose_load_a_forward_waits_for_is_copied_when_it_has_landed() -> None:
    world = World(40, 40)
    world.register(0, 3)
    world.settle()
    world.enqueue(0, (0, 1))
    world.step()
    world.finish(0)
    world.settle()
    world.tree.evict(2)
    (node,) = world.tree.peek(world.nodes[0], tokens_of((0, 1)))
    assert world.tree.promote(node)
    world.transfers.load(node)
    world.transfers.follow([node])
    kept_while_copied(world, node)
