"""Images of adapters in the host pool: kept when they were read, read again after they left."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sglang_graft.cache import AdapterNode, UnifiedTree
from sglang_graft.pool import Owner
from sglang_graft.tiers.counters import Counters
from sglang_graft.tiers.store import AdapterStore, Packed, Reading

_NOBODY: frozenset[int] = frozenset()


class AdapterChangedError(ValueError):
    """The files of a registered adapter hold other weights than those it was registered with."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the last read of an adapter failed, and when, counted in failures."""

    number: int
    message: str


def _key(node: AdapterNode) -> str:
    return f"node {node.serial}"


@dataclass(slots=True)
class Images:
    """Asks the store for images and finds host pages for them; once a pass by `poll`.

    An image that was read and finds no room stays in memory, and is tried again each pass: the
    store reads no more than its bound meanwhile.
    """

    tree: UnifiedTree
    store: AdapterStore
    counters: Counters
    failed: int = 0
    _failures: dict[int, Failure] = field(default_factory=dict)
    _wanted: dict[str, tuple[AdapterNode, str]] = field(default_factory=dict)
    _homeless: list[tuple[AdapterNode, Packed]] = field(default_factory=list)

    def want(self, node: AdapterNode, name: str, path: Path) -> None:
        """Bring the image of a registered adapter back. Many calls are one read."""
        if node.host is not None or self.is_wanted(node):
            return
        self._wanted[_key(node)] = (node, name)
        self.counters.add(node.identity, disk_reads=1)
        self.store.request(_key(node), path)

    def is_wanted(self, node: AdapterNode) -> bool:
        """Whether its image is being read, or waits for room."""
        return _key(node) in self._wanted or self._is_homeless(node)

    def offer(self, node: AdapterNode, packed: Packed, *, spare: Collection[int] = _NOBODY) -> None:
        """Keep an image that somebody else read, if there is room; else it is read when wanted."""
        self._place(node, packed, spare, foreign=True)

    def failure(self, node: AdapterNode) -> Failure | None:
        """The last failed read of this adapter."""
        return self._failures.get(node.serial)

    def forget(self, node: AdapterNode) -> None:
        """The adapter was unloaded: what is still being read for it is thrown away."""
        self._failures.pop(node.serial, None)
        if self._wanted.pop(_key(node), None) is not None:
            self.store.abandon(_key(node))
        for _, packed in (kept for kept in self._homeless if kept[0] is node):
            self.store.forget(packed)
        self._homeless = [kept for kept in self._homeless if kept[0] is not node]

    def poll(self, *, spare: Collection[int] = _NOBODY) -> None:
        """One pass: deliver what was read, and place what found no room before."""
        waiting, self._homeless = self._homeless, []
        for node, packed in waiting:
            self._house(node, packed, spare)
        for job in self.store.poll():
            self._deliver(job, spare)

    def check_invariants(self) -> None:
        """Assert that nothing waits for a job that does not exist."""
        self.store.check_invariants()
        for key in self._wanted:
            assert self.store.is_under_way(key), f"{key} waits for a read that is not under way"
        for node, _ in self._homeless:
            assert node.host is None, f"{node.identity!r} has an image and waits for room"
            assert not node.dropped, f"{node.identity!r} is dropped and waits for room"

    def _deliver(self, job: Reading, spare: Collection[int]) -> None:
        node, name = self._wanted.pop(job.key)
        error = job.error
        if job.packed is not None and job.packed.image.identity != node.identity:
            self.store.forget(job.packed)
            error = AdapterChangedError(
                f"adapter {name}: its files hold other weights than when it was loaded; load it"
                ' again with "load_inplace": true'
            )
        if error is not None:
            self.failed += 1
            self.counters.add(node.identity, failed_reads=1)
            message = str(error) or type(error).__name__
            self._failures[node.serial] = Failure(self.failed, message)
            return
        assert job.packed is not None, f"{job.key} has ended without a result"
        self.counters.add(node.identity, pages_from_disk=len(job.packed.pages))
        self._house(node, job.packed, spare)

    def _house(self, node: AdapterNode, packed: Packed, spare: Collection[int]) -> None:
        """Give a read image its host pages, now or in a later pass."""
        if node.host is not None:
            self.store.forget(packed)  # somebody offered it meanwhile
        elif not self._place(node, packed, spare, foreign=False):
            self._homeless.append((node, packed))

    def _is_homeless(self, node: AdapterNode) -> bool:
        return any(other is node for other, _ in self._homeless)

    def _place(
        self, node: AdapterNode, packed: Packed, spare: Collection[int], *, foreign: bool
    ) -> bool:
        host = self.tree.host
        assert host is not None, "images need a host tier"
        pages = host.add(node, len(packed.pages), force=True, spare=spare)
        if pages is None:
            return False
        landed = partial(host.landed, pages, Owner.ADAPTER)
        self.store.fill(packed, pages, landed, foreign=foreign)
        return True
