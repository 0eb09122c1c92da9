"""A history of traffic as a workload: one JSON object a line, of single requests or of intervals.

    {"start_s": 0, "seconds": 60, "adapter": "legal", "rank": 16, "requests": 120,
     "prompt_tokens": 900, "output_tokens": 64, "shared_tokens": 512}

`requests` of them (default 1) come evenly at random within `seconds` (default 0) after `start_s`,
each with this prompt and output; the first `shared_tokens` (default 0) of the prompt are the same
for all requests of the adapter. `rank` may be left out on later lines of an adapter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from sglang_graft.sim.workloads import AdapterSpec, Request, Segment, Workload

_KEYS: dict[str, tuple[type, ...]] = {
    "start_s": (int, float),
    "adapter": (str,),
    "prompt_tokens": (int,),
    "output_tokens": (int,),
    "seconds": (int, float),
    "requests": (int,),
    "shared_tokens": (int,),
    "rank": (int,),
}
_NEEDED = ("start_s", "adapter", "prompt_tokens", "output_tokens")


def workload_of(lines: Iterable[str], *, name: str = "history", seed: int = 0) -> Workload:
    """The requests of a history, in order of arrival.

    ValueError names the line and the key that is wrong.
    """
    return _Reader(name, seed).read(lines)


class _Reader:
    def __init__(self, name: str, seed: int) -> None:
        self._name, self._seed = name, seed
        self._source = np.random.default_rng(seed)
        self._ranks: dict[str, int] = {}
        self._shared: dict[tuple[str, int], Segment] = {}
        self._keys = 0
        self._found: list[tuple[float, str, tuple[Segment, ...], Segment]] = []

    def read(self, lines: Iterable[str]) -> Workload:
        for number, line in enumerate(lines, 1):
            if line.strip():
                self._line(number, line)
        if not self._found:
            raise ValueError(f"{self._name}: wanted at least one request")
        names = list(self._ranks)
        self._found.sort(key=lambda entry: entry[0])
        requests = tuple(
            Request(names.index(adapter), prompt, output, at)
            for at, adapter, prompt, output in self._found
        )
        adapters = tuple(AdapterSpec(name, rank) for name, rank in self._ranks.items())
        return Workload(self._name, self._seed, adapters, requests)

    def _line(self, number: int, line: str) -> None:
        row = self._checked(number, line)
        adapter = row["adapter"]
        if "rank" in row:
            self._ranks[adapter] = row["rank"]
        if adapter not in self._ranks:
            raise ValueError(f"line {number}: wanted a rank on the first line of {adapter!r}")
        shared, prompt = row.get("shared_tokens", 0), row["prompt_tokens"]
        if shared >= prompt:
            raise ValueError(
                f"line {number}: wanted shared_tokens below prompt_tokens, got {shared}, {prompt}"
            )
        count = row.get("requests", 1)
        times = row["start_s"] + np.sort(self._source.random(count)) * row.get("seconds", 0)
        for at in times.tolist():
            front = (self._front(adapter, shared),) if shared else ()
            asked = self._segment(prompt - shared)
            answer = self._segment(row["output_tokens"], generated=True)
            self._found.append((at, adapter, (*front, asked), answer))

    def _checked(self, number: int, line: str) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: wanted a JSON object, {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number}: wanted a JSON object, got {line.strip()[:80]}")
        lacking = [key for key in _NEEDED if key not in row]
        if lacking:
            raise ValueError(f"line {number}: wanted {', '.join(lacking)}")
        for key, value in row.items():
            if key not in _KEYS:
                raise ValueError(f"line {number}: wanted keys {', '.join(_KEYS)}; got {key!r}")
            least = 1 if key in ("prompt_tokens", "output_tokens", "requests", "rank") else 0
            right = type(value) in _KEYS[key]
            if not right or (key != "adapter" and value < least):
                raise ValueError(f"line {number}: {key}: wanted {least} or more, got {value!r}")
        return row

    def _front(self, adapter: str, length: int) -> Segment:
        return self._shared.setdefault((adapter, length), self._segment(length))

    def _segment(self, length: int, *, generated: bool = False) -> Segment:
        self._keys += 1
        return Segment(self._keys, length, generated)
