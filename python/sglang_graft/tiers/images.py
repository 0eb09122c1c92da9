"""Images of adapters in the host pool: kept when they were read, read again after they left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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


@dataclass(slots=True)
class _Wanted:
    """An image that is being read: from which folder, and which were tried before."""

    node: AdapterNode
    name: str
    tried: list[Path]


def _nowhere(node: AdapterNode) -> Sequence[tuple[str, Path]]:
    """No other folder holds these weights."""
    return ()


def _key(node: AdapterNode) -> str:
    return f"node {node.serial}"


@dataclass(slots=True)
class Images:
    """Asks the store for images and finds host pages for them; once a pass by `poll`.

    An image that was read and finds no room stays in memory, and is tried again each pass: the
    store reads no more than its bound meanwhile.

    `sources` names every folder that equal weights were registered from: one that has gone bad
    takes nothing from those who named another.
    """

    tree: UnifiedTree
    store: AdapterStore
    counters: Counters
    sources: Callable[[AdapterNode], Sequence[tuple[str, Path]]] = _nowhere
    failed: int = 0
    _failures: dict[int, Failure] = field(default_factory=dict)
    _wanted: dict[str, _Wanted] = field(default_factory=dict)
    _homeless: list[tuple[AdapterNode, Packed]] = field(default_factory=list)

    def want(self, node: AdapterNode, name: str, path: Path) -> None:
        """Bring the image of a registered adapter back. Many calls are one read."""
        if node.host is None and not self.is_wanted(node):
            self._read(_Wanted(node, name, [path]))

    def is_wanted(self, node: AdapterNode) -> bool:
        """Whether its image is being read, or waits for room."""
        return _key(node) in self._wanted or self._is_homeless(node)

    def offer(self, node: AdapterNode, packed: Packed, *, spare: Collection[int] = _NOBODY) -> None:
        """Keep an image that somebody else read, if there is room; else it is read when wanted."""
        self._place(node, packed, spare, foreign=True)

    def failure(self, node: AdapterNode) -> Failure | None:
        """The last read of this adapter, if it failed."""
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

    def _read(self, wanted: _Wanted) -> None:
        """From the last of its folders."""
        self._wanted[_key(wanted.node)] = wanted
        self.counters.add(wanted.node.identity, disk_reads=1)
        self.store.request(_key(wanted.node), wanted.tried[-1])

    def _deliver(self, job: Reading, spare: Collection[int]) -> None:
        wanted = self._wanted.pop(job.key)
        node, error = wanted.node, job.error
        if job.packed is not None and job.packed.image.identity != node.identity:
            self.store.forget(job.packed)
            error = AdapterChangedError(
                f"adapter {wanted.name}: its files hold other weights than when it was loaded; load"
                ' it again with "load_inplace": true'
            )
        if error is not None:
            self._fail(wanted, error)
            return
        assert job.packed is not None, f"{job.key} has ended without a result"
        self._failures.pop(node.serial, None)
        self.counters.add(node.identity, pages_from_disk=len(job.packed.pages))
        self._house(node, job.packed, spare)

    def _fail(self, wanted: _Wanted, error: Exception) -> None:
        """One folder cannot be read: the next one, or the end for all who wait."""
        node = wanted.node
        self.counters.add(node.identity, failed_reads=1)
        for name, path in self.sources(node):
            if path not in wanted.tried:
                self._read(_Wanted(node, name, [*wanted.tried, path]))
                return
        self.failed += 1
        message = str(error) or type(error).__name__
        self._failures[node.serial] = Failure(self.failed, message)

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
