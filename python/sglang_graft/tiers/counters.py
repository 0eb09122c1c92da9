"""What moved between the tiers, and who waited for it: in total and for each adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class TierCounts:
    """Counts since start. Pages are of the arena's size, tokens are of KV."""

    loads: int = 0
    """Adapters copied from the host pool to the device."""
    disk_reads: int = 0
    """Adapters read from disk after they were registered, because the host pool had let them go."""
    failed_reads: int = 0
    promotions: int = 0
    """Runs of KV copied from the host pool to the device."""
    write_backs: int = 0
    """Runs of KV, or adapters, copied from the device to the host pool."""
    pages_to_device: int = 0
    pages_to_host: int = 0
    pages_from_disk: int = 0
    hits_device: int = 0
    """Requests that found their adapter on the device when they were first looked at."""
    hits_host: int = 0
    hits_disk: int = 0
    tokens_device: int = 0
    """Tokens of prompts found on the device then; the next two: on the host, nowhere."""
    tokens_host: int = 0
    tokens_computed: int = 0
    passes_waited: int = 0
    """Scheduling passes in which a request was passed over because its bytes were not there."""
    seconds_waited: float = 0.0
    """Time that requests spent passed over for want of their bytes."""
    thrash: int = 0
    """Adapters and runs of KV loaded again soon after they had left."""


@dataclass(slots=True)
class Counters:
    """`total`, and the same for each adapter identity (None: the base model)."""

    total: TierCounts = field(default_factory=TierCounts)
    by_adapter: dict[str | None, TierCounts] = field(default_factory=dict)

    def add(self, adapter: str | None, **amounts: float) -> None:
        """Add to the named counts of one adapter and of the total."""
        _add((self.of(adapter), self.total), amounts)

    def add_total(self, **amounts: float) -> None:
        """Add to the total alone: the adapter has been forgotten."""
        _add((self.total,), amounts)

    def of(self, adapter: str | None) -> TierCounts:
        """The counts of one adapter."""
        found = self.by_adapter.get(adapter)
        if found is None:
            found = self.by_adapter[adapter] = TierCounts()
        return found

    def forget(self, adapter: str | None) -> None:
        """An adapter was unloaded; the total keeps what it did."""
        self.by_adapter.pop(adapter, None)

    def check_invariants(self) -> None:
        """Assert that no adapter counts more than the total."""
        for name, amount in asdict(self.total).items():
            held = sum(getattr(own, name) for own in self.by_adapter.values())
            # Sums of seconds are rounded.
            assert 0 <= held <= amount + 1e-6, f"{name}: adapters count {held}, total {amount}"


def _add(to: Sequence[TierCounts], amounts: Mapping[str, float]) -> None:
    for name, amount in amounts.items():
        if amount:
            for counts in to:
                setattr(counts, name, getattr(counts, name) + amount)
