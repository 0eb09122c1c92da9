"""Tenants in the scheduler: whose a request is, whose turn it is, and what a cap holds back.

`GraftPrefixCache` has one of these. Without a tenants file every request belongs to the common
share and nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_graft.cache import Reason
from sglang_graft.cache.shares import NOTHING, Incoming, Share, Shares
from sglang_graft.engine.pinning import pages_wanted
from sglang_graft.engine.precedence import Precedence, is_within_floor
from sglang_graft.tenants import carrier
from sglang_graft.tiers.residency import PAGES_OF_A_REQUEST

if TYPE_CHECKING:
    from sglang_graft.engine.prefix_cache import GraftPrefixCache


ATTRIBUTE = "graft_share"
"""Where a request keeps its share once it is known."""


def is_kept(req: Any) -> bool:
    """Whether the tenant of a running request holds no more than its floor."""
    share: Share | None = getattr(req, ATTRIBUTE, None)
    return share is not None and 0 < share.held <= share.floor


@dataclass(frozen=True)
class Limits:
    """One tenant as the scheduler sees it; floor and cap in pages."""

    floor: int
    cap: int | None
    priority: int


class Tenancy:
    """Shares, priorities and promises of one scheduler."""

    def __init__(self, cache: GraftPrefixCache, *, enabled: bool) -> None:
        self.cache = cache
        self.enabled = enabled
        self.shares: Shares = cache.tree.shares
        self.priorities: dict[str, int] = {}
        self.floors_broken = 0
        """Pages taken below floors, which only happens for requests older than the floors."""
        # What the requests that run may come to take, by share: pages, and adapters by serial.
        self._pages: dict[Share, int] = {}
        self._adapters: dict[Share, set[int]] = {}
        self.precedence = Precedence()
        # Ids of the requests of this pass' queue that are looked at; None: no pass has begun.
        self._chosen: set[str] | None = None

    # ---- whose

    def read(self, req: Any) -> tuple[str, bool, str]:
        """(tenant, whether its KV is shared, salt) of a request."""
        text = (req.extra_key or "").removesuffix(req.lora_id or "")
        return carrier.decode(text) if self.enabled else ("", False, text)

    def share(self, req: Any) -> Share:
        """The share that the running KV and the adapters of a request count for."""
        if not self.enabled:
            return self.shares.common
        share: Share | None = getattr(req, ATTRIBUTE, None)
        if share is None:
            share = self.shares.get(self.read(req)[0])
            setattr(req, ATTRIBUTE, share)
        return share

    def kv_share(self, req: Any) -> Share:
        """The share that its cached KV counts for."""
        tenant, shared, _ = self.read(req)
        return self.shares.common if shared else self.shares.get(tenant)

    # ---- limits

    def set_limits(self, wanted: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the limits of all tenants, or raise as `check_limits`, with nothing changed."""
        found = self.check_limits(wanted)
        self.shares.limit({name: (limits.floor, limits.cap) for name, limits in found.items()})
        self.priorities = {name: limits.priority for name, limits in found.items()}

    def check_limits(self, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, Limits]:
        """The limits of all tenants. ValueError if they cannot hold: all floors beside the pinned
        adapters, the largest adapter and the smallest request.
        """
        total = self.cache.tree.ledger.total
        found = {name: _resolve(name, fields, total) for name, fields in wanted.items()}
        floors = sum(limits.floor for limits in found.values())
        pinned = self.cache.residency.pins.pages()
        largest = self.largest_adapter()
        if floors and floors + pinned + largest + PAGES_OF_A_REQUEST > total:
            raise ValueError(
                f"page_floor: all floors together are {floors} pages, wanted at most"
                f" {max(0, total - pinned - largest - PAGES_OF_A_REQUEST)}: the pool has {total},"
                f" pinned adapters hold {pinned}, the largest adapter needs {largest} and a request"
                f" {PAGES_OF_A_REQUEST}"
            )
        return found

    def largest_adapter(self) -> int:
        """Pages of the largest adapter that is known."""
        return max((node.weight_pages for node in self.cache.tree.adapters()), default=0)

    def room(self, req: Any) -> int:
        """Pages that a request could have when nothing else runs: its cap, and what floors leave.

        Weights leave whole, so each floor may keep most of one adapter more.
        """
        share = self.share(req)
        slack = max(0, self.largest_adapter() - 1)
        floors = sum(s.floor + slack for s in self.shares if s.floor and s is not share)
        pinned = self.cache.residency.pins.pages(without=self.cache.residency.node(req.lora_id))
        room = self.cache.tree.ledger.total - floors - pinned
        return room if share.cap is None else min(room, share.cap)

    def enforce_caps(self, incoming: Incoming = NOTHING) -> None:
        """Take from each share what it will hold above its cap once `incoming` pages came."""
        for share in self.shares:
            over = share.over_cap(incoming.get(share, 0))
            if over > 0:
                self.cache.tree.evict(over, Reason.CAP, only=share)

    def provide(self, pages: int, incoming: Incoming) -> None:
        """Free `pages` for requests that run and cannot wait.

        Admission left room for every floor, so this keeps them; unless the floors were raised
        since then. Then rather a floor gives than a request, or the server.
        """
        tree = self.cache.tree
        missing = pages - tree.ledger.free
        if missing > 0:
            missing -= tree.evict(missing, incoming=incoming)
        if missing > 0:
            anything = {share: share.evictable for share in self.shares}
            self.floors_broken += tree.evict(missing, incoming=anything)

    # ---- turns

    def begin_pass(self, running: Iterable[Any], queue: list[Any]) -> None:
        """A pass over the waiting queue: caps hold, promises are counted, turns are fair."""
        self._pages, self._adapters = {}, {}
        self.precedence.begin_pass(self.shares)
        counts: dict[Share, int] = {}
        for req in running:
            self._promise(req)
            share = self.share(req)
            counts[share] = counts.get(share, 0) + 1
        self.enforce_caps()
        self.order(queue, counts)
        self._make_room(queue)

    def _make_room(self, queue: list[Any]) -> None:
        """Evict for the first in line what it could not count upon, but gets by trying.

        A promise leaves out weights that others' KV may stand upon, and the last part of an
        adapter. Without this, such pages would wait for a request that waits for them.
        """
        req = next((req for req in queue if not req.to_finish), None)
        if req is None or not self.shares.floors():
            return
        tree, share = self.cache.tree, self.share(req)
        need = min(self._demand(req, share, self._adapters), tree.ledger.total)
        if tree.ledger.free + self.shares.reach(share) < need:
            tree.evict(need - tree.ledger.free, incoming={share: need})

    def order(self, queue: list[Any], running: Mapping[Share, int]) -> None:
        """Sort the waiting queue in place: priority, then who is within its floor, then in turns.

        The nth waiting request of a tenant with m running ones comes in round m + n; in a round
        the order is the queue's, which SGLang's own policy made.
        """
        if not self.enabled or len(queue) < 2:
            return
        rounds = dict(running)
        keys: dict[int, tuple[int, int, int, int]] = {}
        for place, req in enumerate(queue):
            share = self.share(req)
            turn = rounds.get(share, 0)
            rounds[share] = turn + 1
            first = 0 if is_within_floor(share) else 1
            priority = self.priorities.get(share.name, 0)
            keys[place] = (-priority, first, turn, place)
        queue[:] = [queue[place] for place in sorted(keys, key=keys.__getitem__)]

    def may_start(self, req: Any) -> bool:
        """Whether a waiting request is one of `choose`, and fits below its tenant's cap beside
        those that run and those that this pass has admitted, which have no precedence."""
        if req.to_finish:
            return True
        share = self.share(req)
        if self._chosen is not None and req.rid not in self._chosen:
            return False
        if self.precedence.waits_for_others(share):
            return False
        promised = self._pages.get(share, 0)
        return share.cap is None or promised + self._demand(req, share, self._adapters) <= share.cap

    def choose(self, queue: list[Any]) -> list[Any]:
        """Those of the waiting queue that this pass looks at: they fit below their caps together
        with those before them, and nobody who goes first waits while they come.

        Nothing is loaded for the others: it would push out what the first ones need.
        """
        if not self.enabled:
            return queue
        known = set() if self._chosen is None else self._chosen
        waiting = {self.share(req) for req in queue if not req.to_finish}
        pages = dict(self._pages)
        adapters = {share: set(found) for share, found in self._adapters.items()}
        chosen = []
        for req in queue:
            share = self.share(req)
            if req.rid not in known and self.precedence.comes_later(share, waiting):
                continue
            demand = self._demand(req, share, adapters)
            if share.cap is not None and pages.get(share, 0) + demand > share.cap:
                continue
            chosen.append(req)
            pages[share] = pages.get(share, 0) + demand
            node = self.cache.residency.node(req.lora_id)
            if node is not None:
                adapters.setdefault(share, set()).add(node.serial)
        self._chosen = {req.rid for req in chosen}
        return chosen

    def admitted(self, req: Any) -> None:
        """This pass has admitted a request."""
        self.precedence.admitted(self.share(req))
        self._promise(req)

    def _promise(self, req: Any) -> None:
        """A request runs, and may take what it asked for."""
        share = self.share(req)
        if share.cap is None:
            return
        demand = self._demand(req, share, self._adapters)
        self._pages[share] = self._pages.get(share, 0) + demand
        node = self.cache.residency.node(req.lora_id)
        if node is not None:
            self._adapters.setdefault(share, set()).add(node.serial)

    def _demand(self, req: Any, share: Share, adapters: Mapping[Share, set[int]]) -> int:
        """Pages that a request may come to hold, with its adapter unless `adapters` has it."""
        node = self.cache.residency.node(req.lora_id)
        known = node is None or node.serial in adapters.get(share, ())
        weights = 0 if known or node is None else node.weight_pages
        return pages_wanted(req, self.cache.page_size) + weights

    def report(self) -> dict[str, Any]:
        """Pages of each tenant."""
        rows = {s.name: _row(s) for s in self.shares if s is not self.shares.common}
        common = _row(self.shares.common)
        return {"tenants": rows, "common": common, "floors_broken": self.floors_broken}


def _row(share: Share) -> dict[str, int | None]:
    return {
        "held": share.held,
        "running": share.running,
        "in_use": share.protected,
        "evictable": share.evictable,
        "floor": share.floor,
        "cap": share.cap,
    }


def _resolve(name: str, fields: Mapping[str, Any], total: int) -> Limits:
    """Floor and cap in pages; a fraction is one of the pool."""

    def pages(value: int | float) -> int:
        return int(value * total) if isinstance(value, float) else value

    floor, cap = pages(fields["page_floor"]), fields["page_cap"]
    cap = None if cap is None else pages(cap)
    if cap is not None and (floor > cap or cap < PAGES_OF_A_REQUEST):
        raise ValueError(
            f"tenant {name}: page_cap: wanted at least its page_floor ({floor}) and"
            f" {PAGES_OF_A_REQUEST} for a request, got {cap} pages of {total}"
        )
    return Limits(floor, cap, int(fields["priority"]))
