"""Floors and caps: random histories of tenants on one tree, and the rules one by one."""

from array import array
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_graft.cache import AdapterNode, Lru, Node, State, UnifiedTree
from sglang_graft.cache.shares import Share
from sglang_graft.pool.ledger import Owner, PageLedger

PAGE = 2
TENANTS = ("a", "b", "c")
WHO = st.sampled_from(TENANTS)
INDEX = st.integers(0, 7)


def make_tree(pages: int, host: int = 0) -> UnifiedTree:
    return UnifiedTree(
        PageLedger(pages + 1),
        page_tokens=PAGE,
        policy=Lru(),
        host=PageLedger(host + 1) if host else None,
    )


def tokens(run: tuple[int, ...]) -> "array[int]":
    return array("q", [token for page in run for token in (page, page)])


def put(tree: UnifiedTree, adapter: AdapterNode, run: tuple[int, ...], share: Share) -> Node:
    """Cached KV of a tenant: its running pages are counted as an engine does it."""
    pages = tree.ledger.take(len(run), Owner.KV_RUNNING)
    assert pages is not None
    done = tree.insert(adapter, tokens(run), pages, start=0, salt=share.name, share=share)
    return done.node


def loaded(tree: UnifiedTree, name: str, pages: int, share: Share) -> AdapterNode:
    adapter = tree.add_adapter(name, pages)
    assert tree.load(adapter, share=share) is not None
    tree.loaded(adapter)
    return adapter


def test_others_take_only_what_is_above_the_floor() -> None:
    tree = make_tree(20)
    tree.shares.limit({"b": (8, None)})
    b, a = tree.shares.get("b"), tree.shares.get("a")
    put(tree, tree.base, tuple(range(10)), b)  # the oldest: without the floor it would go first
    put(tree, tree.base, tuple(range(10)), a)
    assert tree.evict(5) == 5
    assert (b.held, a.held) == (8, 7), "two pages above b's floor, then a's"
    assert tree.evict(100) == 7
    assert (b.held, a.held) == (8, 0)
    assert tree.evict(1) == 0
    tree.check_invariants()


def test_a_cut_takes_no_more_than_the_floor_leaves() -> None:
    tree = make_tree(20, host=20)
    assert tree.host is not None
    tree.shares.limit({"b": (6, None)})
    b = tree.shares.get("b")
    node = put(tree, tree.base, tuple(range(10)), b)
    copied = tree.host.add(node, 10)
    assert copied is not None
    tree.host.landed(copied, Owner.KV_CACHED)
    # Cut at page 8, where a group ends; the next one would be at 0, below the floor.
    assert tree.evict(1) == 2
    assert tree.evict(1) == 1
    assert tree.evict(9) == 1
    assert (b.held, tree.evict(1)) == (6, 0)
    tree.check_invariants()


def test_what_a_tenant_gets_it_may_give_up() -> None:
    tree = make_tree(10)
    tree.shares.limit({"b": (8, None)})
    b = tree.shares.get("b")
    put(tree, tree.base, tuple(range(8)), b)
    assert tree.evict(5) == 0
    assert tree.evict(5, incoming={b: 3}) == 3
    assert tree.evict(5, incoming={tree.shares.get("a"): 9}) == 0


def test_weights_never_leave_when_that_goes_below_the_floor() -> None:
    tree = make_tree(30)
    tree.shares.limit({"b": (6, None)})
    b = tree.shares.get("b")
    first = loaded(tree, "first", 5, b)
    put(tree, tree.base, (1, 2, 3), b)
    assert b.held == 8
    assert b.promised(0) == 0, "two pages above the floor, but the victim has five"
    assert tree.evict(9) == 0
    put(tree, tree.base, (4, 5, 6, 7), b)
    assert b.promised(0) == 2
    assert tree.evict(9) == 6
    assert first.state is State.ABSENT
    tree.check_invariants()


def test_a_cap_takes_from_its_own_tenant_first() -> None:
    tree = make_tree(30)
    tree.shares.limit({"a": (0, 10)})
    a, b = tree.shares.get("a"), tree.shares.get("b")
    put(tree, tree.base, tuple(range(6)), b)
    cold = loaded(tree, "cold", 6, a)
    other = tree.add_adapter("other", 7)
    assert tree.load(other, share=a) is not None
    assert (cold.state, a.held, b.held) == (State.ABSENT, 7, 6), "though there was room for both"
    tree.lock(other)
    third = tree.add_adapter("third", 4)
    assert tree.load(third, share=a) is None, "nothing of its own can go"
    assert tree.load(third, share=b) is not None
    tree.check_invariants()


def test_an_adapter_of_two_tenants_belongs_to_neither() -> None:
    tree = make_tree(30)
    tree.shares.limit({"b": (8, None)})
    a, b = tree.shares.get("a"), tree.shares.get("b")
    adapter = loaded(tree, "x", 6, a)
    put(tree, adapter, (1, 2), a)
    assert (adapter.share, a.held) == (a, 8)
    put(tree, adapter, (1, 2, 3), b)
    assert (adapter.share, a.held, b.held) == (tree.shares.common, 2, 3)
    tree.check_invariants()
    assert tree.evict(100) == 2, "b's KV stays, and with it what it needs"
    assert tree.shares.promised() == 0
    tree.shares.limit({})
    assert tree.evict(100) == 9
    assert tree.load(adapter, share=b) is not None
    assert adapter.share is b
    tree.check_invariants()


def test_reach_leaves_room_for_floors_that_are_not_filled() -> None:
    tree = make_tree(20)
    tree.shares.limit({"b": (8, None)})
    a, b = tree.shares.get("a"), tree.shares.get("b")
    put(tree, tree.base, tuple(range(12)), a)
    assert tree.ledger.free + tree.shares.reach(a) == 12
    assert tree.ledger.free + tree.shares.reach(b) == 20
    put(tree, tree.base, tuple(range(3)), b)
    assert tree.ledger.free + tree.shares.reach(a) == 12
    assert tree.ledger.free + tree.shares.reach(b) == 20


class Tenants(RuleBasedStateMachine):
    """Loads, prefixes, locks, floors and caps of three tenants, with a host tier behind."""

    @initialize(pages=st.integers(20, 40), host=st.sampled_from([0, 12]))
    def start(self, pages: int, host: int) -> None:
        self.tree = make_tree(pages, host)
        self.held: list[Node] = []
        self.adapters = [self.tree.add_adapter(f"x{i}", i) for i in range(1, 6)]

    def share(self, who: str) -> Share:
        return self.tree.shares.get(who)

    def below_floor(self) -> dict[str, int]:
        return {s.name: min(s.held, s.floor) for s in self.tree.shares if s.floor}

    @rule(floors=st.tuples(*[st.integers(0, 8)] * 3), caps=st.tuples(*[st.integers(0, 20)] * 3))
    def limit(self, floors: tuple[int, ...], caps: tuple[int, ...]) -> None:
        self.tree.shares.limit(
            {
                who: (floor, floor + cap if cap < 16 else None)
                for who, floor, cap in zip(TENANTS, floors, caps, strict=True)
            }
        )

    @rule(who=WHO, index=INDEX, land=st.booleans())
    def load(self, who: str, index: int, land: bool) -> None:
        tree, share = self.tree, self.share(who)
        adapter = self.adapters[index % len(self.adapters)]
        absent = adapter.state is State.ABSENT
        before, others = self.below_floor(), share.held
        promised = tree.ledger.free + tree.shares.promised({share: adapter.weight_pages})
        over = share.over_cap(adapter.weight_pages)
        pages = tree.load(adapter, share=share)
        if absent:
            fits = adapter.weight_pages <= promised and over <= others and pages is not None
            assert fits or pages is None
            if pages is not None:
                assert share.over_cap() <= 0 or share.cap is None
        self.check_floors(before, besides=who)
        if land and adapter.state is State.LOADING:
            tree.loaded(adapter)

    @rule(who=WHO, index=INDEX, run=st.lists(st.integers(0, 1), max_size=5).map(tuple))
    def run(self, who: str, index: int, run: tuple[int, ...]) -> None:
        """A request begins and ends: pages for it, then its KV."""
        tree, share = self.tree, self.share(who)
        adapter = [tree.base, *self.adapters][index % 6]
        if adapter.state is State.ABSENT:
            return
        tree.lock(adapter)
        before, incoming = self.below_floor(), Counter({share: len(run)})
        missing = len(run) - tree.ledger.free
        certain = tree.shares.promised(incoming)
        freed = tree.evict(missing, incoming=incoming)
        assert freed >= min(max(0, missing), certain), "a promise was not kept"
        self.check_floors(before, besides=who)
        if tree.ledger.free >= len(run):
            held = share.held + len(run)
            put(tree, adapter, run, share)
            assert share.held <= held
        tree.unlock(adapter)

    @rule(who=WHO, index=INDEX, run=st.lists(st.integers(0, 1), max_size=5).map(tuple))
    def hold(self, who: str, index: int, run: tuple[int, ...]) -> None:
        adapter = [self.tree.base, *self.adapters][index % 6]
        if adapter.state is not State.ABSENT:
            node = self.tree.match(adapter, tokens(run), salt=who).node
            self.tree.lock(node)
            self.held.append(node)

    @precondition(lambda self: self.held)
    @rule(index=INDEX)
    def leave(self, index: int) -> None:
        self.tree.unlock(self.held.pop(index % len(self.held)))

    @rule(pages=st.integers(0, 12))
    def evict(self, pages: int) -> None:
        before, certain = self.below_floor(), self.tree.shares.promised()
        assert self.tree.evict(pages) >= min(pages, certain)
        self.check_floors(before)

    @rule(who=WHO)
    def enforce(self, who: str) -> None:
        share = self.share(who)
        others = {s.name: s.held for s in self.tree.shares if s is not share}
        self.tree.evict(share.over_cap(), only=share)
        assert share.over_cap() <= share.protected
        assert others == {s.name: s.held for s in self.tree.shares if s is not share}

    @rule(index=INDEX)
    def promote(self, index: int) -> None:
        """Copy what is about to leave to the host, or bring something of it back."""
        tree = self.tree
        if tree.host is None:
            return
        for node in tree.coldest(20):
            top = node
            while top.parent is not None and top.parent is not top.adapter and not top.parent.host:
                top = top.parent
            if top.host is None and (copy := tree.host.add(top, len(top.pages))) is not None:
                owner = Owner.ADAPTER if top is top.adapter else Owner.KV_CACHED
                tree.host.landed(copy, owner)
        before = self.below_floor()
        for adapter in (tree.base, *self.adapters):
            for child in list(adapter.children.values()):
                if not child.pages and child.host and adapter.state is not State.ABSENT:
                    # Its adapter may turn out to be shared, and leave its tenant so.
                    moved = adapter.share.name if adapter.share is not child.share else ""
                    pages = tree.promote(child)
                    self.check_floors(before, besides=moved or child.share.name)
                    if pages is not None and index % 2 and child.pages == pages:
                        tree.landed(pages)
                    return

    def check_floors(self, before: dict[str, int], besides: str = "") -> None:
        """Nobody's need but its own took a tenant below its floor, or further below."""
        for name, held in before.items():
            now = self.share(name).held
            assert name == besides or now >= held, (name, held, now)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check_invariants()
            self.tree.ledger.check_invariants()


TestTenants = Tenants.TestCase
TestTenants.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
