"""Device, host and disk of one pool as the scheduler loop drives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_graft.cache import AdapterNode, State, UnifiedTree
from sglang_graft.pool import Owner
from sglang_graft.tiers.copies import Way
from sglang_graft.tiers.counters import Counters, TierCounts
from sglang_graft.tiers.idle import IdlePromotion
from sglang_graft.tiers.images import Images
from sglang_graft.tiers.prefetch import Prefetch
from sglang_graft.tiers.rates import MeasuredRates
from sglang_graft.tiers.store import Packed
from sglang_graft.tiers.transfers import Transfers
from sglang_graft.tiers.wish import Wish
from sglang_graft.tiers.write_back import WriteBack


@dataclass(slots=True)
class Tiers:
    """One object a pool. `step` once a scheduling pass, `before_forward` once a launch.

    `write_back` None keeps KV off the host; `idle` None promotes nothing unasked. `pinned` names
    the adapters that have pages for good, and wait for their bytes without any request.
    """

    tree: UnifiedTree
    transfers: Transfers
    images: Images
    prefetch: Prefetch
    counters: Counters
    rates: MeasuredRates
    page_bytes: int
    write_back: WriteBack | None
    idle: IdlePromotion | None = None
    pinned: Callable[[], Sequence[AdapterNode]] = tuple

    def step(self, wishes: Sequence[Wish]) -> None:
        """Note what has landed, write back, then start what the waiting requests need."""
        self.rates.step()
        self.transfers.poll()
        coming = [node for node in self.pinned() if node.state is State.LOADING]
        self.images.poll(spare=self.prefetch.spared() | {node.serial for node in coming})
        for node in coming:
            mine = (wish for wish in wishes if wish.node is node)
            asked = any(self.prefetch.failure(wish) is None for wish in mine)
            self._bring_pinned(node, asked=asked)
        for wish in wishes:
            if self.prefetch.is_new(wish):
                self.tree.expect(wish.node, wish.tokens, salt=wish.salt)
        if self.write_back is not None:
            # Before any load: what has come in since the last pass may be what a load evicts. But
            # an image that a load is about to read stays, or it would be read again for ever.
            self.write_back.run(self.prefetch.spared())
        self.prefetch.consider(wishes)
        if self.idle is not None and not wishes:
            self.idle.run()

    def before_forward(self) -> None:
        """On the forward's queue, before each launch."""
        self.transfers.before_forward()

    def offer(self, adapter: AdapterNode, packed: Packed) -> None:
        """A registered adapter's bytes, read by somebody else."""
        self.images.offer(adapter, packed, spare=self.prefetch.spared())

    def forget(self, adapter: AdapterNode) -> None:
        """The adapter leaves the tree for good."""
        self.images.forget(adapter)
        self.counters.forget(adapter.identity)

    @property
    def is_reading(self) -> bool:
        """Whether threads read adapters, or fill them into the host pool."""
        return not self.images.store.idle

    @property
    def at_rest(self) -> bool:
        """Whether nothing is being read or copied."""
        return self.transfers.idle and not self.is_reading

    def report(self) -> dict[str, Any]:
        """Pages of the host pool by owner, what is under way, and the counters."""
        host = self.tree.host
        assert host is not None, "tiers need a host tier"
        ledger = host.ledger
        return {
            "pages": {
                "total": ledger.total,
                "free": ledger.free,
                "adapter": ledger.count(Owner.ADAPTER),
                "kv_cached": ledger.count(Owner.KV_CACHED),
                "in_flight": ledger.count(Owner.IN_FLIGHT),
            },
            "pages_loading": self.transfers.pages_under_way(Way.LOAD),
            "pages_storing": self.transfers.pages_under_way(Way.STORE),
            "evictions": self.tree.evicted_adapters,
            "kv_pages_demoted": self.tree.demoted_pages,
            "kv_pages_dropped": self.tree.dropped_pages + host.dropped_pages,
            **self._counted(self.counters.total),
            "rates": asdict(self.rates.meter.current) | {"changes": self.rates.changes},
        }

    def adapter_report(self, adapter: AdapterNode) -> dict[str, float]:
        """The same counters for one adapter, and its pages on the host."""
        return {
            "host_pages": len(adapter.host.pages) if adapter.host else 0,
            "host_kv_pages": adapter.host_kv_pages,
            "kv_pages_demoted": adapter.demoted_pages,
            "kv_pages_dropped": adapter.dropped_pages,
            **self._counted(self.counters.of(adapter.identity)),
        }

    def _counted(self, counts: TierCounts) -> dict[str, float]:
        """Counts as plain numbers, pages that moved also in bytes."""
        found: dict[str, float] = asdict(counts)
        moved = {name: n for name, n in found.items() if name.startswith("pages_")}
        found |= {
            name.replace("pages", "bytes", 1): n * self.page_bytes for name, n in moved.items()
        }
        return found

    def _bring_pinned(self, node: AdapterNode, *, asked: bool) -> None:
        """The next step for one that has its pages; after a failed read only when `asked` for."""
        host = self.tree.host
        assert host is not None, "tiers need a host tier"
        if self.transfers.has(node):
            return
        if node.host is None:
            if asked or self.images.failure(node) is None:
                self.images.want(node, *self.prefetch.paths(node))
        elif host.is_readable(node):
            self.transfers.load(node)
            self.counters.add(node.identity, loads=1, pages_to_device=len(node.pages))

    def check_invariants(self) -> None:
        """Assert the invariants of everything that moves; the tree has its own."""
        self.transfers.check_invariants()
        self.images.check_invariants()
        self.counters.check_invariants()
