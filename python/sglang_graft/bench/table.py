"""Results as rows: units that differ in their seed alone are one row, those never measured too."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_graft.bench.units import Results

DEFAULT_SLOTS = 8
"""Stock SGLang's own `--max-loras-per-batch`."""
GOAL_TTFT_MS = 500.0
"""A rate counts as served when the mean time to the first token stays below this."""
CUT_SHARE = 0.05
"""Of the requests sent, how many may still have no token when the unit ends: a unit ends amid its
conversations, so the last turns are always under way, but what queues up must not go unseen."""

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """What a table is about."""

    workload: str
    adapters: int | None
    seconds: float
    most: int | None
    budget_gb: float

    @property
    def title(self) -> str:
        """For a heading."""
        parts = [self.workload, f"{self.budget_gb:g} GB", f"first turns for {self.seconds:g} s"]
        if self.adapters is not None:
            parts.append(f"{self.adapters} adapters")
        if self.most is not None:
            parts.append(f"at most {self.most} requests")
        return ", ".join(parts)


@dataclass(slots=True)
class Row:
    """One peer at one rate. `asked`: how many units were wanted, measured or not."""

    place: Place
    peer: dict[str, Any]
    rate: float | None
    asked: int = 0
    results: list[Result] = field(default_factory=list)
    problems: list[Result] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The peer's name."""
        return str(self.peer["label"])

    @property
    def is_split(self) -> bool:
        """Whether this is a static split under the workload's own traffic."""
        return self.peer["engine"] == "stock" and not self.peer["base_traffic"]

    @property
    def missing(self) -> int:
        """Units that were asked for and not tried yet."""
        return self.asked - len(self.results) - len(self.problems)

    def values(self, *path: str) -> list[float]:
        """A figure of every repeat that has it."""
        found = (value_of(result, path) for result in self.results)
        return [value for value in found if value is not None]

    def middle(self, *path: str) -> float | None:
        """Its median over repeats, or None."""
        values = self.values(*path)
        return statistics.median(values) if values else None

    @property
    def ttft_ms(self) -> float | None:
        """Median over repeats of the mean time to the first token."""
        return self.middle("figures", "ttft_ms", "mean")

    @property
    def served(self) -> bool:
        """Whether in every repeat no request failed, nearly all had a token by the end, and the
        mean time to the first token (those without one count as long as they waited) met the
        goal."""
        figures = [result["figures"] for result in self.results]
        kept_up = all(
            own["errors"] == 0 and own["ttft_cut"] <= CUT_SHARE * own["sent"] for own in figures
        )
        means = self.values("figures", "ttft_ms", "mean")
        told = 0 < len(means) == len(self.results)
        return kept_up and told and all(mean < GOAL_TTFT_MS for mean in means)

    @property
    def seeds(self) -> set[int]:
        """Those that it was measured with."""
        return {seed_of(result) for result in self.results}

    def of_seed(self, seed: int) -> Row:
        """The same row with that repeat alone."""
        return replace(self, results=[r for r in self.results if seed_of(r) == seed])


def seed_of(result: Result) -> int:
    """Results of one load with equal seeds answered the same requests."""
    return int(result["unit"]["load"]["seed"])


def value_of(result: Result, path: Sequence[str]) -> float | None:
    """A figure of a result; None when it has none."""
    value: Any = result
    for key in path:
        value = None if value is None else value.get(key)
    return None if value is None else float(value)


def rows(results: Results) -> list[Row]:
    """Every row, measured or not, in the order in which they were asked for."""
    found: dict[tuple[Any, ...], Row] = {}
    for unit in results.asked().values():
        _row(found, unit).asked += 1
    for result in results.read_some():
        row = _row(found, result["unit"])
        kept = row.results if result["status"] == "measured" else row.problems
        kept.append(result)
        row.asked = max(row.asked, len(row.results) + len(row.problems))
    return list(found.values())


def _row(found: dict[tuple[Any, ...], Row], unit: dict[str, Any]) -> Row:
    load = unit["load"]
    place = Place(load["name"], load["adapters"], load["seconds"], load["most"], unit["budget_gb"])
    key = (place, unit["peer"]["label"], load["rate"])
    return found.setdefault(key, Row(place, unit["peer"], load["rate"]))


def places(found: Sequence[Row]) -> list[Place]:
    """The tables, each once."""
    return list(dict.fromkeys(row.place for row in found))


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest rate that a peer served, None when it served none; `fails`: the lowest that it
    did not, None when it served all; both are None when nothing was tried."""

    rate: float | None
    fails: float | None


def peak(found: Iterable[Row], place: Place, label: str) -> Peak:
    """Of one peer: the highest measured rate up to which every one was served."""
    own = [r for r in found if r.place == place and r.label == label and r.rate is not None]
    best: float | None = None
    for row in sorted((r for r in own if r.results), key=lambda r: r.rate or 0):
        if not row.served:
            return Peak(best, row.rate)
        best = row.rate
    return Peak(best, None)
