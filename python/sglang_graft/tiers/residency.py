"""Which adapters this process knows, and which row of the pointer table each one in a batch has.

A server's adapter id names one registration. Registrations with equal weights share one identity,
and with it one image, one node of the tree and one set of pages.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sglang_graft.adapters import Adapter, AdapterImage, PointerTable, TileMap, pack
from sglang_graft.cache import AdapterNode, State, UnifiedTree
from sglang_graft.pool import Arena
from sglang_graft.tiers.pins import Pins
from sglang_graft.tiers.store import Packed

BASE_SLOT = 0
# SGLang admits a request with a page of prompt, one to round, and room to spare.
PAGES_OF_A_REQUEST = 3


@dataclass(slots=True, eq=False)
class KnownAdapter:
    """One registration: a name of an identity. `image` has no bytes: they are in the host pool,
    and can be read again from `path`."""

    adapter_id: str
    name: str
    path: Path
    image: AdapterImage
    node: AdapterNode
    hits: int = 0
    """Admitted requests that found the weights on the device when they came."""
    priority: int = 0


def _keep(node: AdapterNode, packed: Packed) -> None:
    """No host pool: the bytes are read from disk whenever they are wanted."""


def _forget(node: AdapterNode) -> None:
    """Nobody else keeps anything for an adapter."""


@dataclass(slots=True)
class _Slot:
    """A row of the pointer table. `loads` tells a reload, which has other pages, from before."""

    node: AdapterNode | None = None
    loads: int = 0
    last_use: int = 0


@dataclass(slots=True)
class Residency:
    """Registers adapters and gives the ones in a batch their slots.

    `offer` takes the bytes of a registered adapter, `forget` hears of one that is gone for good;
    whoever brings adapters to the device sets both.
    """

    tree: UnifiedTree
    arena: Arena
    tile_map: TileMap
    table: PointerTable
    offer: Callable[[AdapterNode, Packed], None] = _keep
    forget: Callable[[AdapterNode], None] = _forget
    pins: Pins = field(init=False)
    _known: dict[str, KnownAdapter] = field(default_factory=dict)
    # Retired: no name leads here, but requests that were accepted before may still start.
    _retired: dict[str, KnownAdapter] = field(default_factory=dict)
    # Removed: only requests that run already still need it.
    _leaving: dict[str, KnownAdapter] = field(default_factory=dict)
    _slots: list[_Slot] = field(default_factory=list)
    _slot_of: dict[int, int] = field(default_factory=dict)
    _clock: int = 0

    def __post_init__(self) -> None:
        self._slots = [_Slot() for _ in range(self.table.slots)]
        self.pins = Pins(self.tree)

    def add(
        self, adapter_id: str, name: str, adapter: Adapter, image: AdapterImage | None = None
    ) -> KnownAdapter:
        """Make `adapter` usable under `adapter_id`; its weights stay on the host for now.

        `image` spares packing it here. ValueError when it can never fit into the pool beside the
        pinned adapters and the smallest request, or not into the host pool.
        """
        assert self._find(adapter_id) is None, f"adapter id {adapter_id} is registered already"
        packed = Packed.of(adapter, image or pack(adapter, self.tile_map))
        pages = len(packed.pages)
        self.check_size(name, adapter.identity, pages)
        node = self.tree.add_adapter(adapter.identity, pages)
        bare = self._shared_image(adapter.identity) or packed.image
        known = KnownAdapter(adapter_id, name, adapter.path, bare, node)
        self._known[adapter_id] = known
        if node.host is None:
            self.offer(node, packed)
        return known

    def check_size(self, name: str, identity: str, pages: int) -> None:
        """ValueError when weights of `pages` pages can never be used here, as in `add`."""
        total = self.tree.ledger.total
        pinned = self.pins.pages(without=self.tree.adapter(identity))
        if pages + pinned + PAGES_OF_A_REQUEST > total:
            page_bytes = self.arena.layout.page_bytes
            beside = f", pinned adapters hold {pinned}" if pinned else ""
            raise ValueError(
                f"adapter {name}: its weights take {pages} pages ({pages * page_bytes:,} bytes),"
                f" the whole pool has {total} ({total * page_bytes:,} bytes){beside} and a request"
                f" needs {PAGES_OF_A_REQUEST}; raise --max-total-tokens or --mem-fraction-static"
            )
        self._check_host(name, pages)

    def pin_adapter(self, adapter_id: str, *, instead_of: str | None = None) -> bool:
        """Promote an adapter and keep it on the device until it is retired; False: no room now.

        The pin of `instead_of` goes in exchange; it stays when this one is not taken. ValueError
        when pins would leave too little for the largest other adapter and the smallest request.
        """
        known = self._known[adapter_id]
        exchanged = instead_of is not None and self.pins.give(instead_of)
        try:
            node = known.node
            self.check_pin(known.name, node, node.weight_pages, (adapter_id, instead_of))
            taken = self.pins.take(adapter_id, known.node)
        except ValueError:
            taken = False
            raise
        finally:
            if exchanged and not taken:
                assert instead_of is not None
                restored = self.pins.take(instead_of, self._known[instead_of].node)
                assert restored, "a pin that was just given back could not be taken again"
        return taken

    def unpin_adapter(self, adapter_id: str) -> bool:
        """Let a pinned adapter be evicted again; False when it was not pinned."""
        return self.pins.give(adapter_id)

    def prioritize(self, adapter_id: str, priority: int) -> None:
        """How much longer this adapter stays than others. Of several names the highest counts."""
        known = self._known[adapter_id]
        known.priority = priority
        self._weigh(known.node)

    def retire(self, adapter_id: str) -> int:
        """No name leads to this registration any more, requests accepted before still may start.

        Frees at once what nobody holds, unless another registration has the same weights; returns
        the pages freed. `remove` it when the last such request has ended.
        """
        known = self._known.pop(adapter_id)
        self.pins.give(adapter_id)
        self._retired[adapter_id] = known
        self._weigh(known.node)
        return 0 if self._is_shared(known) else self.tree.trim(known.node)

    def remove(self, adapter_id: str) -> int:
        """Forget one registration; the last one of an identity drops its pages and its KV.

        Returns the pages that became free at once. What running requests still hold follows when
        they end; until then they find their adapter as before.
        """
        if adapter_id in self._known:
            self.pins.give(adapter_id)
        found = self._known.pop(adapter_id, None) or self._retired.pop(adapter_id)
        self._weigh(found.node)
        self.purge()
        freed = 0
        if not self._is_shared(found, or_retired=True):
            self.forget(found.node)
            freed = self.tree.drop(found.node)
        if found.node.lock:
            self._leaving[adapter_id] = found
        return freed

    def held_pages(self, adapter_id: str) -> int:
        """Pages of weights and KV that a retired registration keeps until its requests end."""
        known = self._retired[adapter_id]
        return 0 if self._is_shared(known) else len(known.node.pages) + known.node.kv_pages

    def host_bytes(self) -> int:
        """Bytes that images take in the host pool."""
        images = [node.host for node in self.tree.adapters() if node.host is not None]
        return sum(len(image.pages) for image in images) * self.arena.layout.page_bytes

    def sources(self, node: AdapterNode) -> list[tuple[str, Path]]:
        """Name and folder of every registration of this node, those with a name first."""
        registered = (*self._known.values(), *self._retired.values())
        found = [(known.name, known.path) for known in registered if known.node is node]
        assert found, f"adapter {node.identity!r} is not registered"
        return found

    def source(self, node: AdapterNode) -> tuple[str, Path]:
        """The first of `sources`."""
        return self.sources(node)[0]

    def known(self) -> list[KnownAdapter]:
        """Every registration that a name leads to, in order."""
        return list(self._known.values())

    def retired(self) -> list[KnownAdapter]:
        """Every registration that only waits for its last request, in order."""
        return list(self._retired.values())

    def node(self, adapter_id: str | None) -> AdapterNode | None:
        """The node of a registration (None: the base model); None when it is not registered."""
        if adapter_id is None:
            return self.tree.base
        known = self._find(adapter_id)
        return None if known is None else known.node

    def is_known(self, adapter_id: str | None) -> bool:
        """Whether requests with `adapter_id` may start."""
        return adapter_id is None or adapter_id in self._known or adapter_id in self._retired

    def is_ready(self, adapter_id: str | None) -> bool:
        """Whether the weights are on the device."""
        node = self.node(adapter_id)
        assert node is not None, f"adapter {adapter_id} is not registered"
        return node.state is State.RESIDENT

    def count_hit(self, adapter_id: str | None) -> None:
        """A request was admitted whose adapter was on the device when it came."""
        if adapter_id is not None:
            self._registered(adapter_id).hits += 1

    def activate(self, adapter_ids: Iterable[str | None]) -> dict[str | None, int]:
        """Give every adapter of a batch its slot; call it on the forward's stream.

        All of them must be on the device and locked by the batch's requests.
        """
        self._clock += 1
        self.purge()
        wanted = sorted({i for i in adapter_ids if i is not None})
        found = {i: self._registered(i) for i in wanted}
        slots: dict[str | None, int] = {None: BASE_SLOT}
        for known in found.values():
            state = known.node.state
            assert state is State.RESIDENT, f"adapter {known.name} is in a batch, and {state.value}"
            if (slot := self._slot_of.get(known.node.serial)) is not None:
                self._slots[slot].last_use = self._clock
        for adapter_id, known in found.items():
            slots[adapter_id] = self._slot(known)
        return slots

    def check_invariants(self) -> None:
        """Assert that slots, nodes and registrations agree."""
        taken = {slot.node.serial: i for i, slot in enumerate(self._slots) if slot.node}
        assert taken == self._slot_of, f"slots hold {taken}, the index says {self._slot_of}"
        assert self._slots[BASE_SLOT].node is None, "slot 0 belongs to the base model"
        for known in (*self._known.values(), *self._retired.values()):
            held = self.tree.adapter(known.node.identity)
            assert held is known.node, f"adapter {known.name}: its node is not in the tree"
            assert known.node.weight_pages == len(known.image.pages), f"{known.name}: page count"
        pinned = self.pins.ids()
        assert set(pinned) <= set(self._known), f"{pinned} are pinned, but not all are registered"
        self.pins.check_invariants()

    def _find(self, adapter_id: str) -> KnownAdapter | None:
        places = (self._known, self._retired, self._leaving)
        return next((place[adapter_id] for place in places if adapter_id in place), None)

    def _registered(self, adapter_id: str) -> KnownAdapter:
        known = self._find(adapter_id)
        assert known is not None, f"adapter {adapter_id} is not registered"
        return known

    def _is_shared(self, one: KnownAdapter, *, or_retired: bool = False) -> bool:
        """Whether another registration, by default one with a name, has the same weights."""
        others = (*self._known.values(), *(self._retired.values() if or_retired else ()))
        return any(other.node is one.node for other in others)

    def _shared_image(self, identity: str) -> AdapterImage | None:
        for known in (*self._known.values(), *self._retired.values()):
            if known.node.identity == identity:
                return known.image
        return None

    def _weigh(self, node: AdapterNode) -> None:
        named = [known.priority for known in self._known.values() if known.node is node]
        self.tree.prioritize(node, max(named, default=0))

    def _check_host(self, name: str, pages: int) -> None:
        host = self.tree.host
        if host is not None and pages > host.ledger.total:
            size = self.arena.layout.page_bytes
            raise ValueError(
                f"adapter {name}: its weights take {pages * size:,} bytes, the whole host pool has"
                f" {host.ledger.total * size:,}; raise --graft-host-memory-gb"
            )

    def check_pin(
        self,
        name: str,
        node: AdapterNode | None,
        weights: int,
        but: Collection[str | None] = (),
    ) -> None:
        """ValueError when a pin on `weights` pages would leave too little for all others.

        `node` is theirs, if the tree knows them; registrations in `but` do not count.
        """
        total = self.tree.ledger.total
        pinned = weights + self.pins.pages(without=node)
        kept = {*self.pins.ids(), *but}
        others = [other.node for i, other in self._known.items() if i not in kept]
        largest = max((n.weight_pages for n in others if n is not node), default=0)
        if pinned + largest + PAGES_OF_A_REQUEST > total:
            raise ValueError(
                f"adapter {name}: pinned adapters would hold {pinned} pages of {total}; the"
                f" largest other adapter needs {largest} and a request {PAGES_OF_A_REQUEST}. Load"
                ' it with "pinned": false, unload another pinned one, or raise --max-total-tokens'
            )

    def purge(self) -> None:
        """Let go of removed registrations whose last request has ended, and of their images."""
        if self._leaving:
            self._leaving = {i: known for i, known in self._leaving.items() if known.node.lock}

    def _slot(self, known: KnownAdapter) -> int:
        node = known.node
        index = self._slot_of.get(node.serial)
        if index is None:
            index = self._free_slot()
            self._slot_of[node.serial] = index
        slot = self._slots[index]
        slot.last_use = self._clock
        if slot.node is not node or slot.loads != node.loads:
            layout = self.arena.layout
            self.table.set(
                index, known.image, node.pages, self.arena.base_address, layout.page_bytes
            )
            slot.node, slot.loads = node, node.loads
        return index

    def _free_slot(self) -> int:
        """The least recently used slot that this batch does not need."""
        candidates = range(BASE_SLOT + 1, len(self._slots))
        index = min(candidates, key=lambda i: (self._slots[i].last_use, i))
        slot = self._slots[index]
        assert slot.last_use < self._clock, f"more adapters in a batch than {len(candidates)} slots"
        if slot.node is not None:
            del self._slot_of[slot.node.serial]
            slot.node = None
        return index
