"""Images of adapters in the host pool: read from disk when wanted, and again after they left."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from sglang_graft.cache import AdapterNode, UnifiedTree
from sglang_graft.pool import Owner
from sglang_graft.tiers.counters import Counters
from sglang_graft.tiers.store import AdapterStore, Packed, Reading

_NOBODY: frozenset[int] = frozenset()
OnRead = Callable[[Packed | Exception], AdapterNode | None]


class AdapterChangedError(ValueError):
    """The files of a registered adapter hold other weights than those it was registered with."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the last read of an adapter failed, and when, counted in failures."""

    number: int
    message: str


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
    _on_read: dict[str, OnRead] = field(default_factory=dict)
    _nodes: dict[str, AdapterNode] = field(default_factory=dict)
    _homeless: list[tuple[AdapterNode, Packed]] = field(default_factory=list)

    def register(self, key: str, path: Path, on_read: OnRead) -> None:
        """Read a new adapter; `on_read` gets it, or the error, and returns its node or None."""
        assert key not in self._on_read, f"{key} is being read already"
        self._on_read[key] = on_read
        self.store.request(key, path)

    def want(self, node: AdapterNode, name: str, path: Path) -> None:
        """Bring the image of a registered adapter back. Many calls are one read."""
        key = f"node {node.serial}"
        if node.host is not None or self.is_wanted(node):
            return
        self._nodes[key] = node
        self._on_read[key] = lambda result: self._reread(key, name, result)
        self.counters.add(node.identity, disk_reads=1)
        self.store.request(key, path)

    def is_wanted(self, node: AdapterNode) -> bool:
        """Whether its image is being read, or waits for room."""
        return f"node {node.serial}" in self._nodes or self._is_homeless(node)

    def place(self, node: AdapterNode, packed: Packed, *, spare: Collection[int] = _NOBODY) -> None:
        """Give a read image its host pages, now or in a later pass."""
        if not self._place(node, packed, spare):
            self._homeless.append((node, packed))

    def failure(self, node: AdapterNode) -> Failure | None:
        """The last failed read of this adapter."""
        return self._failures.get(node.serial)

    def cancel(self, key: str) -> None:
        """Nobody waits for this registration any more."""
        self._on_read.pop(key, None)
        self.store.abandon(key)

    def forget(self, node: AdapterNode) -> None:
        """The adapter was unloaded: what is still being read for it is thrown away."""
        key = f"node {node.serial}"
        self._failures.pop(node.serial, None)
        if self._nodes.pop(key, None) is not None:
            self.cancel(key)
        for _, packed in (kept for kept in self._homeless if kept[0] is node):
            self.store.forget(packed)
        self._homeless = [kept for kept in self._homeless if kept[0] is not node]

    def poll(self, *, spare: Collection[int] = _NOBODY) -> None:
        """One pass: deliver what was read, and place what found no room before."""
        waiting, self._homeless = self._homeless, []
        for node, packed in waiting:
            if node.host is None:
                self.place(node, packed, spare=spare)
            else:
                self.store.forget(packed)  # written back from the device meanwhile
        for job in self.store.poll():
            self._deliver(job, spare)

    def check_invariants(self) -> None:
        """Assert that nothing waits for a job that does not exist."""
        self.store.check_invariants()
        for key in self._on_read:
            assert self.store.is_under_way(key), f"{key} waits for a read that is not under way"
        assert set(self._nodes) <= set(self._on_read), "a node waits and nobody will tell it"
        for node, _ in self._homeless:
            assert node.host is None, f"{node.identity!r} has an image and waits for room"
            assert not node.dropped, f"{node.identity!r} is dropped and waits for room"

    def _deliver(self, job: Reading, spare: Collection[int]) -> None:
        result = job.packed or job.error
        assert result is not None, f"{job.key} has ended without a result"
        node = self._on_read.pop(job.key)(result)
        if job.packed is None:
            return
        if node is None or node.dropped or node.host is not None or self._is_homeless(node):
            self.store.forget(job.packed)
        else:
            self.place(node, job.packed, spare=spare)

    def _is_homeless(self, node: AdapterNode) -> bool:
        return any(other is node for other, _ in self._homeless)

    def _reread(self, key: str, name: str, result: Packed | Exception) -> AdapterNode | None:
        node = self._nodes.pop(key)
        if isinstance(result, Packed) and result.image.identity != node.identity:
            result = AdapterChangedError(
                f"adapter {name}: its files hold other weights than when it was loaded; unload it"
                " and load it again"
            )
        if isinstance(result, Packed):
            return node
        self.failed += 1
        self.counters.add(node.identity, failed_reads=1)
        message = str(result) or type(result).__name__
        self._failures[node.serial] = Failure(self.failed, message)
        return None

    def _place(self, node: AdapterNode, packed: Packed, spare: Collection[int]) -> bool:
        host = self.tree.host
        assert host is not None, "images need a host tier"
        pages = host.add(node, len(packed.pages), force=True, spare=spare)
        if pages is None:
            return False
        self.store.fill(packed, pages, lambda: host.landed(pages, Owner.ADAPTER))
        return True
