"""What is copied to the host, in which order, and when copies make room for it."""

from helpers_tiers import World, tokens_of


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
