"""Random histories of the tree against a model that knows every page and every choice."""

from array import array
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_graft.cache import AdapterNode, Lru, Node, State, UnifiedTree
from sglang_graft.pool.ledger import Owner, PageLedger

PAGE_TOKENS = 2
Path = tuple[str, tuple[int, ...]]  # salt, one number a page

# Two numbers a page and short runs: most runs share a prefix with an earlier one.
RUNS = st.lists(st.integers(0, 1), max_size=6).map(tuple)
SALTS = st.sampled_from(["", "", "s"])
INDEX = st.integers(0, 7)


@dataclass
class Entry:
    """A page of KV, or the weights of an adapter (pages > 1, or 0)."""

    pages: list[int]
    last_use: int
    locks: int = 0


@dataclass
class ModelAdapter:
    node: AdapterNode
    own: Entry
    kv: dict[Path, Entry] = field(default_factory=dict)

    def path(self, salt: str, run: tuple[int, ...]) -> list[Path]:
        """Cached pages of a run, longest prefix by brute force."""
        found: list[Path] = []
        for length in range(1, len(run) + 1):
            if (salt, run[:length]) not in self.kv:
                break
            found.append((salt, run[:length]))
        return found

    def is_leaf(self, path: Path) -> bool:
        salt, run = path
        return not any(s == salt and r[:-1] == run for s, r in self.kv)


@dataclass
class Held:
    owner: ModelAdapter
    node: Node
    path: list[Path]
    salt: str
    run: tuple[int, ...]


def tokens_of(run: tuple[int, ...], tail: int = 0) -> "array[int]":
    flat = [token for page in run for token in (page, page + 10)]
    return array("q", flat + [99] * tail)


class TreeMachine(RuleBasedStateMachine):
    """LRU leaves by last use. Nodes that tie are on one path, so the order has no ties at all."""

    @initialize(pages=st.integers(12, 40))
    def start(self, pages: int) -> None:
        self.ledger = PageLedger(pages + 1, reserve=2)
        self.tree = UnifiedTree(self.ledger, page_tokens=PAGE_TOKENS, policy=Lru())
        self.clock = 0
        self.models = [ModelAdapter(self.tree.base, Entry([], 0))]
        self.dropped: list[ModelAdapter] = []
        self.held: list[Held] = []
        self.names = 0

    def pick(self, index: int) -> ModelAdapter:
        return self.models[index % len(self.models)]

    def touch(self, model: ModelAdapter, path: list[Path]) -> None:
        self.clock += 1
        model.own.last_use = self.clock
        for step in path:
            model.kv[step].last_use = self.clock

    def candidates(self) -> list[tuple[int, ModelAdapter, Path | None]]:
        """What could go next, one page of KV or one adapter at a time."""
        found: list[tuple[int, ModelAdapter, Path | None]] = []
        for model in self.models + self.dropped:
            if not model.kv and not model.own.locks and model.own.pages:
                found.append((model.own.last_use, model, None))
            for path, entry in model.kv.items():
                if not entry.locks and model.is_leaf(path):
                    found.append((entry.last_use, model, path))
        return found

    def model_evict(self, wanted: int) -> int:
        freed = 0
        while freed < wanted:
            options = self.candidates()
            if not options:
                break
            _, model, path = min(options, key=lambda option: option[0])
            if path is None:
                freed += len(model.own.pages)
                model.own.pages = []
            else:
                freed += len(model.kv.pop(path).pages)
        return freed

    def model_evictable(self) -> int:
        entries = [e for m in self.models + self.dropped for e in (m.own, *m.kv.values())]
        return sum(len(entry.pages) for entry in entries if not entry.locks)

    @rule(weight_pages=st.integers(0, 5))
    def add(self, weight_pages: int) -> None:
        if len(self.models) > 4:
            return
        name = f"adapter-{self.names % 3}"
        self.names += 1
        known = self.tree.adapter(name)
        if known is not None:
            assert self.tree.add_adapter(name, known.weight_pages) is known
            return
        self.models.append(ModelAdapter(self.tree.add_adapter(name, weight_pages), Entry([], 0)))

    @rule(index=INDEX, use_reserve=st.booleans(), land=st.booleans())
    def load(self, index: int, use_reserve: bool, land: bool) -> None:
        model = self.pick(index)
        if model.node.state is not State.ABSENT:
            assert self.tree.load(model.node, use_reserve=use_reserve) == []
            return
        wanted = model.node.weight_pages
        room = self.ledger.free - (0 if use_reserve else 2)
        pages = self.tree.load(model.node, use_reserve=use_reserve)
        if wanted > room + self.model_evictable():
            assert pages is None
            return
        self.model_evict(wanted - room)
        assert pages is not None
        assert pages == model.node.pages
        assert len(pages) == wanted
        self.clock += 1
        model.own.pages, model.own.last_use = list(pages), self.clock
        if land:
            self.tree.loaded(model.node)

    @rule(index=INDEX)
    def land(self, index: int) -> None:
        model = self.pick(index)
        if model.node.state is State.LOADING:
            self.tree.loaded(model.node)

    @rule(index=INDEX, run=RUNS, salt=SALTS, tail=st.integers(0, 1), hold=st.booleans())
    def match(self, index: int, run: tuple[int, ...], salt: str, tail: int, hold: bool) -> None:
        model = self.pick(index)
        found = self.tree.match(model.node, tokens_of(run, tail), salt=salt)
        path = model.path(salt, run)
        assert found.pages == [page for step in path for page in model.kv[step].pages]
        self.touch(model, path)
        if hold:
            self.hold(model, found.node, path, salt, run)

    def hold(
        self, model: ModelAdapter, node: Node, path: list[Path], salt: str, run: tuple[int, ...]
    ) -> None:
        self.tree.lock(node)
        for entry in (model.own, *(model.kv[step] for step in path)):
            entry.locks += 1
        self.held.append(Held(model, node, path, salt, run))

    def release(self, held: Held) -> None:
        self.tree.unlock(held.node)
        for entry in (held.owner.own, *(held.owner.kv[step] for step in held.path)):
            entry.locks -= 1
        if held.owner in self.dropped and not held.owner.own.locks:
            self.dropped.remove(held.owner)

    @precondition(lambda self: self.held)
    @rule(index=INDEX, more=RUNS, keep=st.booleans())
    def finish(self, index: int, more: tuple[int, ...], keep: bool) -> None:
        """A request ends (or its chunk does): its new pages go in, then the old lock goes."""
        held = self.held.pop(index % len(self.held))
        model, node = held.owner, held.owner.node
        run = held.run + more
        start = len(held.path)
        pages = self.take(len(run) - start)
        if pages is not None and node.state is not State.ABSENT:
            self.put(model, run, held.salt, pages, start, keep)
        elif pages:
            self.ledger.give(pages, Owner.KV_RUNNING)
        self.release(held)

    def take(self, n: int) -> list[int] | None:
        missing = n - self.ledger.free
        if missing > 0:
            assert self.tree.evict(missing) == self.model_evict(missing)
        return self.ledger.take(n, Owner.KV_RUNNING)

    @rule(index=INDEX, run=RUNS, salt=SALTS, keep=st.booleans())
    def insert(self, index: int, run: tuple[int, ...], salt: str, keep: bool) -> None:
        model = self.pick(index)
        pages = self.take(len(run))
        if pages is not None and model.node.state is not State.ABSENT:
            self.put(model, run, salt, pages, 0, keep)
        elif pages:
            self.ledger.give(pages, Owner.KV_RUNNING)

    def put(
        self,
        model: ModelAdapter,
        run: tuple[int, ...],
        salt: str,
        pages: list[int],
        start: int,
        keep: bool,
    ) -> None:
        before = model.path(salt, run)
        done = self.tree.insert(
            model.node, tokens_of(run), pages, start=start * PAGE_TOKENS, salt=salt
        )
        assert done.cached_tokens_before == len(before) * PAGE_TOKENS
        assert done.duplicates == len(before) - start
        for place in range(len(before), len(run)):
            model.kv[salt, run[: place + 1]] = Entry([pages[place - start]], 0)
        path = model.path(salt, run)
        assert len(path) == len(run)
        assert done.pages == [page for step in path for page in model.kv[step].pages]
        self.touch(model, path)
        if keep:
            self.hold(model, done.node, path, salt, run)

    @rule(pages=st.integers(0, 9))
    def evict(self, pages: int) -> None:
        assert self.tree.evict(pages) == self.model_evict(pages)

    @rule(index=INDEX)
    def drop(self, index: int) -> None:
        model = self.pick(index)
        if model.node is self.tree.base:
            return
        gone = [path for path, entry in model.kv.items() if not entry.locks]
        freed = sum(len(model.kv.pop(path).pages) for path in gone)
        self.models.remove(model)
        if model.own.locks:
            self.dropped.append(model)
        else:
            freed += len(model.own.pages)
        assert self.tree.drop(model.node) == freed
        assert self.tree.match(model.node, tokens_of((0, 1))).pages == []

    @rule(index=INDEX)
    def trim(self, index: int) -> None:
        model = self.pick(index)
        gone = [path for path, entry in model.kv.items() if not entry.locks]
        freed = sum(len(model.kv.pop(path).pages) for path in gone)
        if not model.own.locks:
            freed += len(model.own.pages)
            model.own.pages = []
        assert self.tree.trim(model.node) == freed
        assert self.tree.adapter(model.node.identity) is model.node

    @rule()
    def reprice(self) -> None:
        self.tree.reprice()

    @precondition(lambda self: not self.held)
    @rule()
    def reset(self) -> None:
        self.tree.reset()
        for model in self.models:
            model.kv.clear()
            model.own.pages = []
        assert self.ledger.free == self.ledger.total

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check_invariants()
        self.ledger.check_invariants()
        assert self.tree.evictable == self.model_evictable()
        for model in self.models + self.dropped:
            assert model.node.pages == model.own.pages
            assert model.node.kv_pages == len(model.kv)
            assert model.node.lock == model.own.locks
            for entry in model.kv.values():
                assert self.ledger.owner_of(entry.pages[0]) is Owner.KV_CACHED


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
