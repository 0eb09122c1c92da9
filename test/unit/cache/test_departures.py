"""What left the device is counted once, with what asked for the room."""

from array import array
from collections.abc import Callable

from sglang_graft.cache import Reason, UnifiedTree
from sglang_graft.cache.departures import KEPT, Departures
from sglang_graft.pool.ledger import Owner

Tokens = Callable[[str], "array[int]"]


def insert(tree: UnifiedTree, identity: str | None, tokens: "array[int]") -> None:
    adapter = tree.adapter(identity)
    assert adapter is not None
    pages = tree.ledger.take(len(tokens) // 2, Owner.KV_RUNNING)
    assert pages is not None
    tree.insert(adapter, tokens, pages, start=0)
    tree.check_invariants()


def load(tree: UnifiedTree, identity: str, pages: int, **more: Reason) -> None:
    node = tree.add_adapter(identity, pages)
    assert tree.load(node, **more) is not None  # type: ignore[arg-type]
    tree.loaded(node)
    tree.check_invariants()


def counts(tree: UnifiedTree) -> dict[tuple[str, str], tuple[int, int]]:
    return {
        (reason.value, "adapter" if weights else "kv"): (events, pages)
        for (reason, weights), (events, pages) in tree.departures.counts.items()
    }


def test_a_request_takes_kv_then_the_adapter(
    make_tree: Callable[[int], UnifiedTree], run: Tokens
) -> None:
    tree = make_tree(10)
    load(tree, "a", 3)
    insert(tree, "a", run("abcd"))
    assert tree.evict(2) == 2
    assert counts(tree) == {("request", "kv"): (1, 2)}
    assert tree.evict(5) == 5
    assert counts(tree) == {("request", "kv"): (2, 4), ("request", "adapter"): (1, 3)}
    last = tree.departures.latest()[-1]
    assert (last.identity, last.weights, last.pages, last.kept) == ("a", True, 3, False)
    assert tree.evicted_adapters == 1
    tree.check_invariants()


def test_a_load_and_a_pin_say_so(make_tree: Callable[[int], UnifiedTree], run: Tokens) -> None:
    tree = make_tree(10)
    insert(tree, None, run("abcdefgh"))
    load(tree, "a", 4)
    load(tree, "b", 3, reason=Reason.PIN)
    assert counts(tree) == {("adapter", "kv"): (1, 2), ("pin", "kv"): (1, 3)}


def test_unload_and_flush(make_tree: Callable[[int], UnifiedTree], run: Tokens) -> None:
    tree = make_tree(20)
    for name in ("a", "b"):
        load(tree, name, 3)
        insert(tree, name, run("ab"))
    node = tree.adapter("a")
    assert node is not None
    assert tree.drop(node) == 5
    assert counts(tree) == {("unload", "kv"): (1, 2), ("unload", "adapter"): (1, 3)}
    tree.reset()
    assert counts(tree)["flush", "kv"] == (1, 2)
    assert counts(tree)["flush", "adapter"] == (1, 3)
    tree.check_invariants()


def test_promotion_and_what_the_host_keeps() -> None:
    from helpers_tiers import World

    world = World(8, 30)
    world.enqueue(None, (0, 1, 0, 1))
    world.step()
    world.finish(-1)
    world.settle()
    assert world.tree.evict(4) == 4
    (gone,) = world.tree.departures.latest()
    assert gone.kept == (world.tree.demoted_pages == 4)
    assert gone.reason is Reason.REQUEST
    world.check()


def test_only_the_latest_are_kept_one_by_one() -> None:
    departures = Departures(now=lambda: 7.0)
    for clock in range(KEPT + 10):
        departures.note(clock, Reason.REQUEST, None, 2, weights=False, kept=False)
        departures.check_invariants()
    departures.note(99, Reason.REQUEST, None, 0, weights=False, kept=False)
    assert departures.counts == {(Reason.REQUEST, False): [KEPT + 10, 2 * (KEPT + 10)]}
    assert [one.clock for one in departures.latest()] == list(range(10, KEPT + 10))
    assert departures.latest()[0].at == 7.0
