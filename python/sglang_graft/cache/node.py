"""Records of the unified tree: adapter nodes on the first level, KV nodes below, results."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from sglang_graft.cache.shares import Share

# (value when pushed, serial, push number, node). The push number keeps tuples comparable when
# one node has a live and a dead entry of equal value.
Entry: TypeAlias = "tuple[float, int, int, Node]"


class HostCopy:
    """The bytes of a node in host memory.

    pages: host pages, one for each device page that the node has or had.
    entry: its live record in the host tier's order of victims, None if it has none.
    """

    __slots__ = ("entry", "pages")

    def __init__(self, pages: list[int]) -> None:
        self.pages = pages
        self.entry: Entry | None = None


class State(enum.Enum):
    """Where an adapter's weights are, seen from the device."""

    ABSENT = "absent"  # no pages
    LOADING = "loading"  # pages are taken, the copy into them is under way
    RESIDENT = "resident"  # the copy has landed (the base model is always here)


class Node:
    """A page-aligned run of tokens and the pages that hold its KV.

    A KV node is on the device (`pages`), on the host (`host`), or on both; never on neither. What
    is on the device has its parent there too.

    key: the run's tokens as native int64 bytes, 8 * page_tokens bytes a page.
    edge: the name under which `parent.children` lists this node: the bytes of its first page,
        followed by the salt if the parent is an adapter node.
    pages: page numbers, one a page of `key`; empty while the node is not on the device. Pages of
        the ledger's owner IN_FLIGHT are being filled and hold no KV yet.
    host: the copy in host memory, None if there is none.
    device_children: children that have pages; such a node is never taken off the device.
    left: logical clock of the moment at which it last left the device, 0 = never.
    last_forward: while nobody holds it: no forward after the first so many has touched its pages.
    lock: requests that hold this node or one below it; 0 = evictable.
    hits: matches that passed through it; last_use: logical clock of the last match or insert.
    start: pages of KV above it on its path.
    whole: it ends where a request ended; not so once its end was cut off or it is an upper part.
    uses, used_at: the policy's own record of admitted requests that read it.
    share: whose pages these are; the tree sets it.
    serial: creation order in the tree, the last word in every decision.
    entry: its live record in the victim heap, None if it has none.
    """

    __slots__ = (
        "adapter",
        "children",
        "device_children",
        "edge",
        "entry",
        "hits",
        "host",
        "key",
        "last_forward",
        "last_use",
        "left",
        "lock",
        "pages",
        "parent",
        "serial",
        "share",
        "start",
        "used_at",
        "uses",
        "whole",
    )

    def __init__(self, serial: int, key: bytes, pages: list[int], edge: bytes) -> None:
        self.serial = serial
        self.key = key
        self.pages = pages
        self.edge = edge
        self.parent: Node | None = None
        self.adapter: AdapterNode
        self.share: Share
        self.children: dict[bytes, Node] = {}
        self.lock = 0
        self.hits = 0
        self.last_forward = 0
        self.last_use = 0
        self.left = 0
        self.start = 0
        self.whole = True
        self.uses = 0.0
        self.used_at = 0.0
        self.entry: Entry | None = None
        self.host: HostCopy | None = None
        self.device_children = 0

    def is_victim(self) -> bool:
        """Whether eviction may take it now: unlocked, nothing below on the device, pages to give.

        The last condition also excludes the base model and absent adapters.
        """
        return self.lock == 0 and not self.device_children and bool(self.pages)

    def is_host_victim(self) -> bool:
        """Whether its host copy is the only one, with nothing below that would be lost with it."""
        return self.host is not None and not self.pages and not self.children


class AdapterNode(Node):
    """The namespace of one adapter identity; `pages` are the pages of its weights.

    identity: None is the base model.   weight_pages: pages that a load takes.
    kv_pages: device pages of the KV nodes below.   host_kv_pages: their host pages.
    loads, evictions: how often the weights came and went.
    demoted_pages, dropped_pages: pages of its KV that left the device, for the host or for good.
    dropped: forgotten by the tree; it matches nothing and leaves with its last lock.
    priority: how much longer it and its KV stay than others, in steps; see `policy`.
    """

    __slots__ = (
        "demoted_pages",
        "dropped",
        "dropped_pages",
        "evictions",
        "host_kv_pages",
        "identity",
        "kv_pages",
        "loads",
        "priority",
        "state",
        "weight_pages",
    )

    def __init__(self, serial: int, identity: str | None, weight_pages: int) -> None:
        super().__init__(serial, b"", [], b"")
        self.adapter = self
        self.identity = identity
        self.weight_pages = weight_pages
        self.state = State.ABSENT
        self.kv_pages = 0
        self.host_kv_pages = 0
        self.demoted_pages = 0
        self.dropped_pages = 0
        self.loads = 0
        self.evictions = 0
        self.dropped = False
        self.priority = 0


class Match(NamedTuple):
    """The longest prefix on the device; valid until the next evict or load unless `node` is locked.

    pages: page numbers from the first token on, a list of the caller's own.
    node: the last node of the prefix; the adapter node if nothing matched.
    """

    pages: list[int]
    node: Node


class Insertion(NamedTuple):
    """What an insert left in the tree.

    node: the last node of the run (lock this one).   cached_tokens_before: tokens of the run that
    were already cached on the device.   duplicates: caller's pages that went back to the ledger.
    pages: the page numbers of the whole run as the tree holds it now; use these in place of the
    caller's.
    """

    node: Node
    cached_tokens_before: int
    duplicates: int
    pages: list[int]
