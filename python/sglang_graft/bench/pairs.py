"""Figures of one peer beside another's with the same seed, so with the same requests."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_graft.bench.table import DEFAULT_SLOTS, Place, Row, peak, seed_of, value_of

TTFT = ("figures", "ttft_ms", "mean")


@dataclass(frozen=True, slots=True)
class Pair:
    """A figure of both sides. `tried`: how many others had that seed; the lowest is `other`."""

    seed: int
    own: float
    other: float
    label: str
    tried: int

    @property
    def ratio(self) -> float:
        """Own over other."""
        return self.own / self.other


def pairs(row: Row, others: Iterable[Row], *path: str) -> list[Pair]:
    """For each seed that `row` and any of `others` have: with the lowest figure of theirs."""
    rivals = list(others)
    found = []
    for result in row.results:
        seed, own = seed_of(result), value_of(result, path)
        known = [
            (value, rival.label)
            for rival in rivals
            for theirs in rival.results
            if seed_of(theirs) == seed and (value := value_of(theirs, path)) is not None
        ]
        if own is not None and known:
            found.append(Pair(seed, own, *min(known), len(known)))
    return found


def splits(found: Iterable[Row], row: Row) -> list[Row]:
    """The static splits that were tried with the requests of `row`, itself if it is one."""
    return [r for r in found if (r.place, r.rate) == (row.place, row.rate) and r.is_split]


def default_split(found: Iterable[Row], row: Row) -> list[Row]:
    """The one of them with stock SGLang's own number of slots, if it was tried."""
    return [r for r in splits(found, row) if r.peer["slots"] == DEFAULT_SLOTS]


def without_lora(found: Iterable[Row], row: Row) -> list[Row]:
    """The server without LoRA, if it was asked the requests of `row`."""
    here = (r for r in found if (r.place, r.rate) == (row.place, row.rate))
    return [r for r in here if r.peer["engine"] == "base"]


def told(own: Sequence[Pair], row: Row) -> str:
    """Their ratio as a cell: the median, the lowest and the highest, and what they leave out."""
    if not own:
        return "-"
    ratios = [pair.ratio for pair in own]
    notes = []
    if len(own) > 1:
        notes.append(f"{min(ratios):.2f}-{max(ratios):.2f}")
    if len(own) < len(row.results):
        notes.append(f"{len(own)} of {len(row.results)} seeds")
    text = f"{statistics.median(ratios):.2f}x"
    return f"{text} ({', '.join(notes)})" if notes else text


def over_default_peak(found: Iterable[Row], place: Place, label: str) -> float | None:
    """By how much a peer's peak rate lies above the default split's at least, whichever of the
    seeds is taken that both have; None where the rates tried do not show it for every one."""
    here = [r for r in found if r.place == place]
    default = f"stock:{DEFAULT_SLOTS}"
    known = [set().union(*(r.seeds for r in here if r.label == one)) for one in (label, default)]
    least = []
    for seed in set.intersection(*known):
        same = [r.of_seed(seed) for r in here]
        own, fails = peak(same, place, label).rate, peak(same, place, default).fails
        # The default split's peak lies below the rate at which it failed.
        if own is None or fails is None:
            return None
        least.append(own / fails)
    return min(least, default=None)
