"""A lower bound of the cost that any policy can have, which knows the whole trace.

The time between two uses of an object (the weights of an adapter, or a run of KV pages of one
prefix) is an interval. Keeping the object over its interval saves what bringing it back costs.
With fractions of objects allowed, choosing intervals under the capacity at each admission is a
linear program, in fact a flow along the line of admissions. Its optimum is at most the cost of
every policy, because it gives up conditions that a policy must meet:
  - the future is known;
  - KV may stay without its adapter, and a page without the pages before it;
  - fractions of weights may be kept;
  - no page is lost to a request that was admitted at the same moment.
It keeps: pages held by running requests, sizes, costs, the order of admissions, first-time costs.
Pages of a run that are used together form one interval with the mean price of a page. That is no
loss of validity: of such a run a policy keeps a front part, and front pages are the cheaper ones.

With a host tier, each interval may also be kept on the host, on pages of its own; bringing it back
then costs the copy. The two tiers may share the pages of an object (no copy is needed on the host
of what stays on the device), which is more than a write-through host can do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from sglang_graft.cache.rates import Rates
from sglang_graft.sim.schedule import Schedule, Server
from sglang_graft.sim.trace import Demand, Trace

IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]
FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Interval:
    """`pages` of an object that may be kept from admission `start` (the first one that they occupy)
    to `end`, where they are used again. full_s: seconds to bring them back from nowhere; copy_s:
    from the host."""

    start: int
    end: int
    pages: int
    full_s: float
    copy_s: float


@dataclass(slots=True)
class Uses:
    """A trace as intervals. compulsory_s: first-time costs, which no cache can save."""

    intervals: list[Interval] = field(default_factory=list)
    compulsory_s: float = 0.0


def uses(trace: Trace, plan: Schedule, rates: Rates) -> Uses:
    """Cut the schedule into intervals."""
    return _Cutter(trace, rates).cut(plan)


class _Cutter:
    """Walks the events. `_left[object]`: slot from which it lies unused, -1 = never seen."""

    def __init__(self, trace: Trace, rates: Rates) -> None:
        self.trace, self.rates = trace, rates
        self.found = Uses()
        adapters = len(trace.workload.adapters)
        self._blocks_left = np.full(trace.blocks, -1)
        self._blocks_held = np.zeros(trace.blocks, dtype=np.int64)
        self._adapters_left, self._adapters_held = [-1] * adapters, [0] * adapters

    def cut(self, plan: Schedule) -> Uses:
        slot = 0
        for event in plan.events:
            demand = self.trace.demands[event.request]
            if event.admitted:
                self._adapter(demand.adapter, slot)
                self._prompt(demand, slot)
                slot += 1
            else:
                self._release(demand, slot)
        return self.found

    def _adapter(self, adapter: int, slot: int) -> None:
        if not self._adapters_held[adapter]:
            pages = self.trace.weight_pages(adapter)
            nbytes = pages * self.trace.sizes.page_bytes
            copy = self.rates.load_seconds(nbytes)
            full = copy + self.rates.read_seconds(nbytes)
            self._again(self._adapters_left[adapter], slot, pages, full, copy)
        self._adapters_held[adapter] += 1

    def _prompt(self, demand: Demand, slot: int) -> None:
        """Groups of pages with one history become one interval each."""
        size = self.trace.sizes.page_tokens
        usable = demand.usable // size
        held = self._blocks_held[demand.blocks]
        self._blocks_held[demand.blocks] = held + 1
        left = self._blocks_left[demand.blocks[:usable]]
        left[held[:usable] > 0] = slot
        edges = (np.flatnonzero(left[1:] != left[:-1]) + 1).tolist()
        for first, end in pairwise((0, *edges, usable)):
            if first < end:
                self._run(first, end, int(left[first]), slot)
        tail = usable * size
        self.found.compulsory_s += self.rates.prefill_seconds(demand.prompt - tail, tail)

    def _run(self, first: int, end: int, left: int, slot: int) -> None:
        """Pages first..end of the prompt have lain since `left` (slot: they are held now)."""
        if left == slot:
            return
        sizes, pages = self.trace.sizes, end - first
        full = self.rates.prefill_seconds(pages * sizes.page_tokens, first * sizes.page_tokens)
        self._again(left, slot, pages, full, self._copy(first, end))

    def _copy(self, first: int, end: int) -> float:
        """Seconds to bring pages first..end back from the host, each one in the cheaper way."""
        size, page = (
            self.trace.sizes.page_tokens,
            self.rates.load_seconds(self.trace.sizes.page_bytes),
        )
        if page <= self.rates.prefill_seconds(size, first * size):
            return page * (end - first)
        return sum(min(page, self.rates.prefill_seconds(size, p * size)) for p in range(first, end))

    def _again(self, left: int, slot: int, pages: int, full: float, copy: float) -> None:
        if left < 0:
            self.found.compulsory_s += full
        elif left < slot and pages:
            self.found.intervals.append(Interval(left, slot, pages, full, copy))

    def _release(self, demand: Demand, slot: int) -> None:
        self._adapters_held[demand.adapter] -= 1
        if not self._adapters_held[demand.adapter]:
            self._adapters_left[demand.adapter] = slot
        held = self._blocks_held[demand.blocks] - 1
        self._blocks_held[demand.blocks] = held
        self._blocks_left[demand.blocks[held == 0]] = slot


def lower_bound(trace: Trace, plan: Schedule, server: Server, *, host_pages: int) -> float:
    """Seconds that no policy can go below on this schedule; host_pages 0 is no host tier."""
    found = uses(trace, plan, server.rates)
    saved = _savings(found.intervals, [server.pages - held for held in plan.held], host_pages)
    return found.compulsory_s + sum(i.full_s for i in found.intervals) - saved


def _savings(intervals: list[Interval], room: list[int], host_pages: int) -> float:
    """The most seconds that keeping can save. Variables: pages kept of each interval on the device
    and on the host, pages free at each admission (flow along the line), in each tier."""
    if not intervals:
        return 0.0
    start = np.array([i.start for i in intervals])
    end = np.array([i.end for i in intervals])
    pages = np.array([i.pages for i in intervals], dtype=np.float64)
    device = np.array([i.full_s for i in intervals]) / pages
    host = np.array([i.full_s - i.copy_s for i in intervals]) / pages
    tiers = [(device, np.array(room, dtype=np.float64))]
    if host_pages:
        tiers.append((host, np.full(len(room), float(host_pages))))
    return _solve(start, end, pages, tiers)


def _solve(
    start: IntArray, end: IntArray, pages: FloatArray, tiers: list[tuple[FloatArray, FloatArray]]
) -> float:
    """Best savings. tiers: (seconds saved by a page of each interval, pages free at each slot).

    Row t of a tier says: what is kept or free at slot t fills the room there. Written as the
    difference to row t - 1, an interval stands in two rows only, where it starts and where it ends.
    """
    count, slots = len(pages), len(tiers[0][1])
    width = count + slots
    rows, columns, values, right, profit = [], [], [], [], []
    for tier, (saving, room) in enumerate(tiers):
        row, column = tier * slots, tier * width
        own, free = np.arange(count) + column, np.arange(slots) + column + count
        rows += [start + row, end + row, np.arange(slots) + row, np.arange(1, slots) + row]
        columns += [own, own, free, free[:-1]]
        values += [np.ones(count), -np.ones(count), np.ones(slots), -np.ones(slots - 1)]
        right.append(np.diff(room, prepend=0.0))
        profit.append(np.concatenate([saving, np.zeros(slots)]))
    matrix = coo_matrix(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
        shape=(slots * len(tiers), width * len(tiers)),
    )
    both, limit = None, None
    if len(tiers) == 2:  # an interval is kept once, in one tier or the other
        ones = np.arange(count)
        both = coo_matrix(
            (np.ones(2 * count), (np.tile(ones, 2), np.concatenate([ones, ones + width]))),
            shape=(count, 2 * width),
        ).tocsr()
        limit = pages
    most = np.tile(np.concatenate([pages, np.full(slots, np.inf)]), len(tiers))
    solved = linprog(
        -np.concatenate(profit),
        A_ub=both,
        b_ub=limit,
        A_eq=matrix.tocsr(),
        b_eq=np.concatenate(right),
        bounds=np.stack([np.zeros_like(most), most], axis=1),
        method="highs",
    )
    assert solved.status == 0, f"the program of {count} intervals was not solved: {solved.message}"
    return float(-solved.fun)
