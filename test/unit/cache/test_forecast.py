"""A forecast names exactly what a load then evicts, and changes nothing."""

from array import array
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_policies_stateful import INDEX, RUNS, Replica

from sglang_graft.cache import AdapterNode, Node, State, UnifiedTree, forecast
from sglang_graft.pool.ledger import Owner

Make = Callable[..., UnifiedTree]
Run = Callable[[str], "array[int]"]
PRIORITIES = st.sampled_from([-2, -1, 0, 0, 1, 3])


def resident(tree: UnifiedTree, name: str, pages: int) -> AdapterNode:
    node = tree.add_adapter(name, pages)
    assert tree.load(node) is not None
    tree.loaded(node)
    return node


def cached(tree: UnifiedTree, adapter: AdapterNode, tokens: "array[int]") -> Node:
    pages = tree.ledger.take(len(tokens) // 2, Owner.KV_RUNNING)
    assert pages is not None
    return tree.insert(adapter, tokens, pages, start=0).node


def test_free_pages_cost_nobody_anything(make_tree: Make) -> None:
    tree = make_tree(10)
    resident(tree, "a", 3)
    assert forecast(tree, 7) == (0, [])


def test_kv_first_then_its_adapter(make_tree: Make, run: Run) -> None:
    tree = make_tree(8)
    a = resident(tree, "a", 3)
    kv = cached(tree, a, run("xy"))
    resident(tree, "b", 2)
    assert forecast(tree, 2) == (0, [(kv, 1)])
    assert forecast(tree, 4).losses == [(kv, 2), (a, 3)]
    before = [(n.serial, list(n.pages)) for n in (a, kv)]
    tree.check_invariants()
    assert before == [(n.serial, list(n.pages)) for n in (a, kv)]


def test_no_room_says_how_much_is_missing(make_tree: Make) -> None:
    tree = make_tree(8, reserve=2)
    a = resident(tree, "a", 3)
    b = resident(tree, "b", 3)
    tree.lock(b)
    assert forecast(tree, 6) == (1, [])
    assert forecast(tree, 6, use_reserve=False) == (3, [])
    assert forecast(tree, 3, held=[a]) == (1, [])
    tree.unlock(b)
    assert forecast(tree, 5, held=[a]).losses == [(b, 3)]


def test_priority_moves_an_adapter_and_its_kv_back(make_tree: Make, run: Run) -> None:
    tree = make_tree(8)
    a = resident(tree, "a", 2)
    kv = cached(tree, a, run("x"))
    b = resident(tree, "b", 2)
    assert [loss.node for loss in forecast(tree, 8).losses] == [kv, a, b]
    tree.prioritize(a, 1)
    assert [loss.node for loss in forecast(tree, 8).losses] == [b, kv, a]
    tree.prioritize(a, -1)
    assert [loss.node for loss in forecast(tree, 8).losses] == [kv, a, b]
    tree.check_invariants()


def test_priority_is_no_class_of_its_own(make_tree: Make) -> None:
    tree = make_tree(8)
    a = resident(tree, "a", 2)
    tree.prioritize(a, 1)
    b = resident(tree, "b", 2)
    b.last_use += 2000  # used so much later that the priority of the idle one no longer helps
    tree._clock = b.last_use
    assert [loss.node for loss in forecast(tree, 8).losses] == [a, b]


class ForecastMachine(RuleBasedStateMachine):
    """Whatever happened before, the next load takes what was forecast."""

    @initialize(
        policy=st.sampled_from(["cost", "lru"]),
        pages=st.integers(8, 24),
        host_pages=st.sampled_from([0, 0, 6, 16]),
    )
    def start(self, policy: str, pages: int, host_pages: int) -> None:
        self.one = Replica(policy, pages, host_pages)

    @rule(index=INDEX, run=RUNS, hold=st.booleans())
    def ask(self, index: int, run: tuple[int, ...], hold: bool) -> None:
        self.one.ask(index, run, hold)

    @precondition(lambda self: self.one.held)
    @rule(index=INDEX)
    def release(self, index: int) -> None:
        self.one.tree.unlock(self.one.held.pop(index % len(self.one.held)))

    @precondition(lambda self: self.one.tree.host is not None)
    @rule(index=INDEX)
    def copy(self, index: int) -> None:
        self.one.copy(index)

    @rule(index=INDEX, priority=PRIORITIES)
    def prioritize(self, index: int, priority: int) -> None:
        adapters = self.one.tree.adapters()
        self.one.tree.prioritize(adapters[index % len(adapters)], priority)

    @rule(reserve=st.integers(0, 3))
    def promise(self, reserve: int) -> None:
        self.one.tree.ledger.reserve = reserve

    @rule()
    def evict(self) -> None:
        expected, lost = self.one.evict_one()
        assert lost == expected

    @rule(index=INDEX, keep=INDEX, use_reserve=st.booleans(), hold=st.booleans())
    def load(self, index: int, keep: int, use_reserve: bool, hold: bool) -> None:
        tree = self.one.tree
        absent = [a for a in tree.adapters() if a.state is State.ABSENT]
        if not absent:
            return
        adapter = absent[index % len(absent)]
        resident = [node for node in self.one.nodes() if node.pages]
        held = [resident[keep % len(resident)]] if resident and hold else []
        expected = forecast(tree, adapter.weight_pages, use_reserve=use_reserve, held=held)
        # The end of a node goes first, so the pages that a loss means are its last ones.
        wanted = {page for loss in expected.losses for page in loss.node.pages[-loss.pages :]}
        before = self._pages()
        for node in held:
            tree.lock(node)
        taken = tree.load(adapter, use_reserve=use_reserve)
        for node in held:
            tree.unlock(node)
        assert (taken is None) == (expected.missing > 0)
        after = self._pages() - {(adapter.serial, page) for page in adapter.pages}
        assert {page for _, page in before - after} == wanted
        if taken is not None:
            tree.loaded(adapter)

    def _pages(self) -> set[tuple[int, int]]:
        """(adapter, page) of everything on the device."""
        return {(n.adapter.serial, page) for n in self.one.nodes() for page in n.pages}

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "one"):
            self.one.tree.check_invariants()
            self.one.tree.ledger.check_invariants()


TestForecast = ForecastMachine.TestCase
TestForecast.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
