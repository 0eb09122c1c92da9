"""Before anything is timed: every shape once, then what single requests take on the warm server."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from scipy.optimize import nnls

from sglang_graft.bench.client import Answer, Send
from sglang_graft.sim.workloads import FIRST_TOKEN, Workload

BURST = 32
# Adapters of the decode burst: several, as batches of the workload have, and no more than stock
# SGLang has slots by default.
_BURST_ADAPTERS = 8
_SHORT, _LONG = 4, 24
# Prompts of the calibration beside the workload's own, and of its burst: short enough to show what
# does not grow with the length, and for a burst of them to stay cached in a small budget.
_SMALL = 64
_REPEATS = 3


@dataclass(slots=True)
class Warmer:
    """Warms the server behind `send`. `names`: None stands for the base model."""

    send: Send
    workload: Workload
    vocabulary: int
    base_only: bool
    flush: Callable[[], Awaitable[None]]
    now: Callable[[], float] = time.perf_counter
    _source: random.Random = field(init=False)

    def __post_init__(self) -> None:
        # A stream of its own: no prompt of the workload may be in a cache before it comes.
        self._source = random.Random(f"warm {self.workload.name} {self.workload.seed}")

    async def warm(self) -> dict[str, Any]:
        """Every length and rank alone, a burst, then the calibration; ends with an empty cache.

        Returns seconds and the calibration. RuntimeError when a request fails: nothing measured
        on such a server would mean anything.
        """
        start = self.now()
        names = self._names()
        for length in self._lengths():
            for name in names:
                await self._one(length, name, _SHORT)
        await self._burst(names)
        found = {"seconds": self.now() - start}
        await self.flush()
        found |= await self._calibrate(names[-1])
        await self.flush()
        return found

    def _names(self) -> list[str | None]:
        """The base model, and one adapter of each rank."""
        by_rank = {adapter.rank: adapter.name for adapter in reversed(self.workload.adapters)}
        return [None, *([] if self.base_only else by_rank.values())]

    def _lengths(self) -> list[int]:
        """Prompts from the shortest to the longest of the workload."""
        found = np.array([r.prompt_tokens for r in self.workload.requests])
        quantiles = np.percentile(found, (0, 50, 90, 100), method="nearest")
        return sorted({int(length) for length in quantiles})

    def _prompt(self, length: int) -> list[int]:
        return [self._source.randrange(FIRST_TOKEN, self.vocabulary) for _ in range(length)]

    async def _one(self, length: int, name: str | None, tokens: int) -> Answer:
        return await self._ask(self._prompt(length), name, tokens)

    async def _ask(self, prompt: list[int], name: str | None, tokens: int) -> Answer:
        answer = Answer()
        await self.send(prompt, name, tokens, answer)
        if answer.error:
            raise RuntimeError(
                f"warm-up, {len(prompt)} tokens to {name or 'the base model'}: {answer.error}"
            )
        return answer

    async def _burst(self, names: list[str | None]) -> None:
        lengths = self._lengths()[:2]
        await asyncio.gather(
            *(
                self._one(lengths[i % len(lengths)], names[i % len(names)], _LONG)
                for i in range(BURST)
            )
        )

    async def _decode_burst(self) -> list[Answer]:
        """Short prompts all at once, to several adapters. The second time they are cached: hardly
        any prefill stands between the tokens."""
        names: list[str | None] = [None]
        if not self.base_only:  # their ranks alternate
            names = [adapter.name for adapter in self.workload.adapters[:_BURST_ADAPTERS]]
        length = min(_SMALL, self._lengths()[0])
        asks = [(self._prompt(length), names[i % len(names)]) for i in range(BURST)]
        for _ in range(2):
            found = await asyncio.gather(*(self._ask(*ask, _LONG) for ask in asks))
        return found

    async def _calibrate(self, name: str | None) -> dict[str, Any]:
        """Time to the first token over length, and time a token, alone and in a burst."""
        rows, alone = [], []
        for length in sorted({min(_SMALL, self._lengths()[0]), *self._lengths()}):
            for _ in range(_REPEATS):
                start = self.now()
                answer = await self._one(length, name, _LONG)
                rows.append((length, answer.arrivals[0][0] - start))
                alone.append(_per_token(answer))
        together = [_per_token(answer) for answer in await self._decode_burst()]
        fit = fit_prefill(rows)
        return {
            "first_token": [[length, round(seconds, 5)] for length, seconds in rows],
            "overhead_s": fit[0],
            "prefill_s_per_token": fit[1],
            "prefill_s_per_token_pair": fit[2],
            "decode_s_per_token_alone": float(np.median(alone)),
            "decode_s_per_token_burst": float(np.median(together)),
        }


def _per_token(answer: Answer) -> float:
    (first, some), (last, every) = answer.arrivals[0], answer.arrivals[-1]
    return (last - first) / max(every - some, 1)


def fit_prefill(rows: list[tuple[int, float]]) -> tuple[float, float, float]:
    """(constant, seconds a token, seconds a pair of tokens), none below 0, by least squares of the
    median of each length.

    rows: (length, seconds) of uncached prompts. The shape of `cache.Rates` with a constant.
    """
    by_length: dict[int, list[float]] = {}
    for length, took in rows:
        by_length.setdefault(length, []).append(took)
    lengths = np.array(list(by_length), dtype=np.float64)
    seconds = np.array([np.median(took) for took in by_length.values()])
    parts = [np.ones_like(lengths), lengths, lengths**2 / 2]
    scale = np.array([part.max() for part in parts])
    matrix = np.stack(parts, axis=1) / scale
    found, _ = nnls(matrix, seconds)
    constant, token, pair = (found / scale).tolist()
    return constant, token, pair


async def flush(client: httpx.AsyncClient, limit_s: float = 60.0) -> None:
    """Empty the server's cache; it refuses while it is not idle, so ask again.

    RuntimeError when it never becomes idle, httpx.HTTPError when it does not answer.
    """
    deadline = time.monotonic() + limit_s
    while True:
        response = await client.post("/flush_cache", timeout=limit_s)
        if response.status_code == httpx.codes.OK:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"/flush_cache: {response.status_code} {response.text[:200]}")
        await asyncio.sleep(0.2)
