"""Units of measurement: a peer, a workload, a rate and a budget. Each one is one file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from sglang_graft.bench.peers import Peer
from sglang_graft.sim.workloads import Size, Workload, generate

FORMAT = 1
"""Of the files; a file of another format is measured again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is sent: the workload `name`, `rate` first turns a second (None: the protocol's) for
    `seconds`, or until `most` requests were made."""

    name: str
    rate: float | None
    seconds: float
    adapters: int | None = None
    most: int | None = None
    seed: int = 0

    def workload(self) -> Workload:
        """The same requests for the same load. ValueError when nothing comes in its time."""
        wanted = 256
        while True:
            size = Size(requests=wanted, adapters=self.adapters, rate=self.rate)
            made = generate(self.name, seed=self.seed, size=size)
            kept = [r for r in made.requests if r.arrival_s < self.seconds]
            enough = len(kept) < len(made.requests)
            if enough or (self.most is not None and len(kept) >= self.most):
                break
            wanted *= 2
        kept = kept[: self.most]
        if not kept:
            raise ValueError(
                f"--seconds: wanted time for a first request of {self.name}, got {self.seconds}"
            )
        return Workload(made.name, made.seed, made.adapters, tuple(kept))


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One measurement."""

    peer: Peer
    load: Load
    budget_gb: float

    @property
    def key(self) -> str:
        """Names its file: equal keys are the same measurement."""
        load = self.load
        parts = [load.name, f"{self.budget_gb:g}gb", self.peer.slug]
        parts.append("rate" + ("" if load.rate is None else f"{load.rate:g}"))
        parts += [f"{load.seconds:g}s", f"seed{load.seed}"]
        if load.adapters is not None:
            parts.append(f"{load.adapters}adapters")
        if load.most is not None:
            parts.append(f"{load.most}requests")
        return "-".join(parts)

    def describe(self) -> dict[str, Any]:
        """As plain data, for its file."""
        return {
            "key": self.key,
            "peer": asdict(self.peer),
            "load": asdict(self.load),
            "budget_gb": self.budget_gb,
        }


@dataclass(frozen=True, slots=True)
class Results:
    """A folder of finished units."""

    folder: Path

    def path(self, unit: Unit) -> Path:
        """Where its result lies, or will lie."""
        return self.folder / "units" / f"{unit.key}.json"

    def finished(self, unit: Unit) -> bool:
        """Whether it was measured before."""
        path = self.path(unit)
        return path.is_file() and json.loads(path.read_text()).get("format") == FORMAT

    def status(self, unit: Unit) -> str:
        """measured, infeasible (the budget is too small) or failed."""
        found: str = json.loads(self.path(unit).read_text())["status"]
        return found

    def write(self, unit: Unit, result: dict[str, Any]) -> None:
        """Keep its result; a run that is cut short leaves no half file."""
        write_json(self.path(unit), {"format": FORMAT, "unit": unit.describe(), **result})

    def ask(self, units: Iterable[Unit]) -> None:
        """Remember what was wanted, so that a report can say what is missing.

        Several runs may share the folder: each adds to what the others asked for.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".asked.lock"):
            wanted = self.asked() | {unit.key: unit.describe() for unit in units}
            write_json(self.folder / "asked.json", wanted)

    def asked(self) -> dict[str, dict[str, Any]]:
        """Every unit that was ever wanted here, by key."""
        path = self.folder / "asked.json"
        found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
        return found

    def read_all(self) -> Iterator[dict[str, Any]]:
        """Every result, by name of file."""
        for file in sorted((self.folder / "units").glob("*.json")):
            result = json.loads(file.read_text())
            if result.get("format") == FORMAT:
                yield result

    def read_some(self) -> list[dict[str, Any]]:
        """The same; ValueError when there is none."""
        found = list(self.read_all())
        if not found:
            raise ValueError(f"wanted results of `graft bench run` in {self.folder}, found none")
        return found


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write beside, then move into place; of several writers at once the last one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(value, separators=(",", ":")) + "\n")
    os.replace(part, path)
