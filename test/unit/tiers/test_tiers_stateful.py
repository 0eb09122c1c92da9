"""Random histories of a pool with tiers: every invariant after each step, twice the same decisions.

Requests come, wait, run, grow, are retracted, aborted and end; adapters are registered, unloaded,
lost and changed on disk; forwards, copies in both directions and disk reads go on one page at a
time, in an order that hypothesis chooses.
"""

from collections.abc import Callable

from helpers_tiers import PAGE_BYTES, PAGE_TOKENS, World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_graft.cache import Prices, make_policy, policy_names

RUNS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
NUMBERS = st.integers(0, 4)
INDEX = st.integers(0, 7)
QUEUES = st.sampled_from(["forward", "load", "store"])


class TierMachine(RuleBasedStateMachine):
    """Two replicas are fed the same events; `each` compares what they decided."""

    @initialize(
        pages=st.integers(8, 12) | st.integers(13, 30),
        host_pages=st.integers(5, 60),
        patience=st.integers(0, 3),
        lookahead=st.integers(1, 5),
        follow_seconds=st.sampled_from([-1.0, 5e-8, 1.0]),
        policy=st.sampled_from(policy_names()),
    )
    def start(
        self,
        pages: int,
        host_pages: int,
        patience: int,
        lookahead: int,
        follow_seconds: float,
        policy: str,
    ) -> None:
        self.worlds = [
            World(
                pages,
                host_pages,
                make_policy(policy, Prices(PAGE_BYTES, PAGE_TOKENS, host_tier=True)),
                patience=patience,
                lookahead=lookahead,
                follow_seconds=follow_seconds,
            )
            for _ in range(2)
        ]
        for number in range(3):
            self.each(lambda world, number=number: world.register(number, 2 + number))
            self.each(lambda world: world.settle())

    def each(self, act: Callable[[World], object]) -> None:
        for world in self.worlds:
            act(world)
        one, two = self.worlds
        assert one.log == two.log
        assert one.host._stack == two.host._stack
        assert one.counters == two.counters

    @rule(number=NUMBERS, size=st.integers(1, 5))
    def register(self, number: int, size: int) -> None:
        self.each(lambda world: world.register(number, size))

    @rule(number=NUMBERS)
    def unload(self, number: int) -> None:
        self.each(lambda world: world.unload(number))

    @rule(number=NUMBERS, run=RUNS, ready=st.booleans())
    def retire(self, number: int, run: tuple[int, ...], ready: bool) -> None:
        """A name goes while a request reads KV that was just cached; then that request ends."""

        def act(world: World) -> None:
            world.enqueue(number, run)
            if ready:
                world.settle()
            world.step()
            world.finish(-1)
            world.enqueue(number, (*run, 0))
            world.step()
            world.retire(number)
            world.finish(-1)
            world.step()

        self.each(act)

    @rule(number=st.none() | NUMBERS, run=RUNS, salt=st.sampled_from(["", "", "s"]))
    def enqueue(self, number: int | None, run: tuple[int, ...], salt: str) -> None:
        self.each(lambda world: world.enqueue(number, run, salt))

    @rule(
        number=st.none() | NUMBERS,
        run=RUNS,
        salt=st.sampled_from(["", "", "s"]),
        before=st.booleans(),
        after=st.booleans(),
    )
    def serve(
        self, number: int | None, run: tuple[int, ...], salt: str, before: bool, after: bool
    ) -> None:
        """A request that starts and ends at once, if it can; copies land before or after it."""

        def act(world: World) -> None:
            world.enqueue(number, run, salt)
            if before:
                world.settle()
            world.step()
            world.finish(-1)
            if after:
                world.settle()

        self.each(act)

    @rule(run=RUNS, passes=st.integers(1, 4))
    def crowd(self, run: tuple[int, ...], passes: int) -> None:
        """Every adapter is wanted at once, while requests of the base model go ahead."""

        def act(world: World) -> None:
            for number in sorted(world.nodes):
                world.enqueue(number, run)
            for _ in range(passes):
                world.enqueue(None, run)
                world.step()
                world.finish(-1)

        self.each(act)

    @rule(pages=st.integers(1, 12))
    def evict(self, pages: int) -> None:
        self.each(lambda world: world.tree.evict(pages))

    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        self.each(lambda world: world.abort(index))

    @rule()
    def step(self) -> None:
        self.each(lambda world: world.step())

    @rule()
    def decode(self) -> None:
        self.each(lambda world: world.decode())

    @rule(index=INDEX, half=st.booleans())
    def finish(self, index: int, half: bool) -> None:
        self.each(lambda world: world.finish(index, half=half))

    @rule(queue=QUEUES, steps=st.integers(1, 6))
    def copies(self, queue: str, steps: int) -> None:
        for _ in range(steps):
            self.each(lambda world: world.copier.advance(queue))

    @rule(index=INDEX)
    def disk(self, index: int) -> None:
        self.each(lambda world: world.executor.advance(index))

    @rule(number=NUMBERS, lost=st.booleans(), changed=st.booleans())
    def files(self, number: int, lost: bool, changed: bool) -> None:
        for world in self.worlds:
            (world.disk.missing.add if lost else world.disk.missing.discard)(number)
            (world.disk.changed.add if changed else world.disk.changed.discard)(number)

    @rule()
    def flush(self) -> None:
        self.each(lambda world: world.flush())

    @rule()
    def settle(self) -> None:
        self.each(lambda world: world.settle())
        self.each(lambda world: world.rest())

    @invariant()
    def consistent(self) -> None:
        for world in getattr(self, "worlds", []):
            world.check()

    def teardown(self) -> None:
        """Every request that is left starts and ends, and flush gives all pages back."""
        for world in getattr(self, "worlds", []):
            world.disk.missing.clear()
            world.disk.changed.clear()
            for _ in range(200 + len(world.queue) + len(world.running)):  # one ends in each
                if not world.queue and not world.running:
                    break
                world.settle()
                world.step()
                world.check()
                world.finish(0)
            assert not world.queue, [request.key for request in world.queue]
            world.settle()
            world.flush()
            world.settle()
            world.check()
            assert world.tiers.at_rest
            assert world.ledger.free == world.ledger.total
            images = sum(len(n.host.pages) for n in world.tree.adapters() if n.host)
            assert world.host.free == world.host.total - images


TestTiers = TierMachine.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
