"""When bytes arrive: reads take turns on the disk, copies on the link to the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang_graft.cache import Node
from sglang_graft.cache.rates import Rates


@dataclass(slots=True)
class Links:
    """Those of one device.   disk_at, link_at: when each is free."""

    rates: Rates
    disk_at: float = 0.0
    link_at: float = 0.0
    _read_at: dict[int, float] = field(default_factory=dict)
    _landed_at: dict[int, float] = field(default_factory=dict)
    """By node: when its bytes are on the host, and on the device."""

    def landed(self, start: float, disk: float, copy: float) -> float:
        """When everything is on the device that takes `disk` seconds to read and `copy` seconds to
        copy, from `start` on."""
        read = start
        if disk:
            read = self.disk_at = max(start, self.disk_at) + disk
        copied = read
        if copy:
            copied = self.link_at = max(read, self.link_at) + copy
        return copied

    def read(self, node: Node, size: int, now: float) -> float:
        """`size` bytes of a node are read from now on; the seconds that it takes."""
        seconds = self.rates.read_seconds(size)
        self._read_at[node.serial] = self.landed(now, seconds, 0.0)
        return seconds

    def copy(self, node: Node, size: int, now: float) -> float:
        """`size` bytes of a node are copied from now on, or once they are read; the seconds that it
        takes."""
        seconds = self.rates.load_seconds(size)
        start = max(now, self._read_at.pop(node.serial, 0.0))
        self._landed_at[node.serial] = self.landed(start, 0.0, seconds)
        return seconds

    def here_at(self, nodes: Iterable[Node]) -> float:
        """When the bytes of these have landed; 0 where none was copied."""
        return max((self._landed_at.get(node.serial, 0.0) for node in nodes), default=0.0)
