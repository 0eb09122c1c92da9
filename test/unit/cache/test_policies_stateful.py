"""Every policy under random events: the victim is the brute-force minimum, and replicas agree."""

from array import array
from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_graft.cache import AdapterNode, Node, Prices, Rates, State, UnifiedTree, make_policy
from sglang_graft.cache.runs import below
from sglang_graft.pool.ledger import Owner, PageLedger

PAGE_TOKENS = 2
RUNS = st.lists(st.integers(0, 1), max_size=5).map(tuple)
INDEX = st.integers(0, 7)


def tokens_of(run: tuple[int, ...]) -> "array[int]":
    return array("q", [token for page in run for token in (page, page + 10)])


class Replica:
    """One tree with everything that a rank does to it; every method answers what it decided."""

    def __init__(self, policy: str, pages: int, host_pages: int) -> None:
        prices = Prices(page_tokens=PAGE_TOKENS, host_tier=host_pages > 0)
        self.policy = make_policy(policy, prices)
        host = PageLedger(host_pages + 1) if host_pages else None
        self.tree = UnifiedTree(
            PageLedger(pages + 1), page_tokens=PAGE_TOKENS, policy=self.policy, host=host
        )
        for name, size in (("a", 1), ("b", 2), ("c", 3)):
            self.tree.add_adapter(name, size)
        self.held: list[Node] = []

    def nodes(self) -> Iterator[Node]:
        for adapter in self.tree.adapters():
            yield adapter
            yield from below(adapter)

    def present(self, index: int) -> AdapterNode:
        adapters = [a for a in self.tree.adapters() if a.state is not State.ABSENT]
        return adapters[index % len(adapters)]

    def load(self, index: int) -> list[int] | None:
        adapters = self.tree.adapters()
        adapter = adapters[index % len(adapters)]
        pages = self.tree.load(adapter)
        if pages:
            self.tree.loaded(adapter)
        return pages

    def ask(self, index: int, run: tuple[int, ...], hold: bool) -> list[int]:
        """A request from match to insert."""
        adapter, tree = self.present(index), self.tree
        match = tree.match(adapter, tokens_of(run))
        tree.use(match.node)
        tree.lock(match.node)
        missing = len(run) - len(match.pages)
        done = match
        if missing <= tree.ledger.free + tree.evictable:
            tree.evict(missing - tree.ledger.free)
            pages = tree.ledger.take(missing, Owner.KV_RUNNING)
            assert pages is not None
            start = PAGE_TOKENS * len(match.pages)
            done = tree.insert(adapter, tokens_of(run), pages, start=start)
            if hold:
                tree.lock(done.node)
                self.held.append(done.node)
        tree.unlock(match.node)
        return list(done.pages)

    def copy(self, index: int) -> int | None:
        """Write a node back whose parent has a copy."""
        host = self.tree.host
        assert host is not None
        ready = [
            node
            for node in self.nodes()
            if node.pages and node.host is None and (node.parent is None or self._below_copy(node))
        ]
        if not ready:
            return None
        node = ready[index % len(ready)]
        taken = host.add(node, len(node.pages))
        if taken is not None:
            host.landed(taken, Owner.ADAPTER if node is node.adapter else Owner.KV_CACHED)
        return node.serial

    def _below_copy(self, node: Node) -> bool:
        parent = node.parent
        return parent is not None and (parent is parent.adapter or parent.host is not None)

    def evict_one(self) -> tuple[int | None, int | None]:
        """(serial of the smallest value by brute force, serial of what lost pages)."""
        if self.policy.changed():
            self.tree.reprice()
        order = [(self.policy.value(n), n.serial) for n in self.nodes() if n.is_victim()]
        expected = min(order, default=(0.0, None))[1]
        before = {node.serial: set(node.pages) for node in self.nodes()}
        self.tree.evict(1)
        after = {page for node in self.nodes() for page in node.pages}
        lost = [serial for serial, pages in before.items() if pages - after]
        assert len(lost) <= 1, f"one page was asked for, nodes {lost} lost some"
        return expected, lost[0] if lost else None


class PolicyMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["cost", "elora", "lru"]),
        pages=st.integers(8, 24),
        host_pages=st.sampled_from([0, 0, 6, 16]),
    )
    def start(self, policy: str, pages: int, host_pages: int) -> None:
        self.one, self.two = (Replica(policy, pages, host_pages) for _ in range(2))

    @rule(index=INDEX)
    def load(self, index: int) -> None:
        assert self.one.load(index) == self.two.load(index)

    @rule(index=INDEX, run=RUNS, hold=st.booleans())
    def ask(self, index: int, run: tuple[int, ...], hold: bool) -> None:
        assert self.one.ask(index, run, hold) == self.two.ask(index, run, hold)

    @precondition(lambda self: self.one.held)
    @rule(index=INDEX)
    def release(self, index: int) -> None:
        for replica in (self.one, self.two):
            replica.tree.unlock(replica.held.pop(index % len(replica.held)))

    @precondition(lambda self: self.one.tree.host is not None)
    @rule(index=INDEX)
    def copy(self, index: int) -> None:
        assert self.one.copy(index) == self.two.copy(index)

    @rule()
    def evict(self) -> None:
        expected, lost = self.one.evict_one()
        assert lost == expected
        assert self.two.evict_one() == (expected, lost)

    @precondition(lambda self: self.one.policy.name == "cost")
    @rule(factor=st.sampled_from([0.25, 3.0]))
    def new_prices(self, factor: float) -> None:
        rates = Rates(h2d_bytes_per_s=50e9 * factor, prefill_s_per_token=3e-5 / factor)
        for replica in (self.one, self.two):
            replica.policy.prices.rates = rates
            replica.tree.reprice()

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "one"):
            return
        for replica in (self.one, self.two):
            replica.tree.check_invariants()
            replica.tree.ledger.check_invariants()
        assert [n.pages for n in self.one.nodes()] == [n.pages for n in self.two.nodes()]


TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
