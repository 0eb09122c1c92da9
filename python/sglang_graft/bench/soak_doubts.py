"""Answers of a soak that part from the first ones where it is no tie, judged once all is quiet.

Two computations of the same weights may differ in every log-probability by the gate's tolerance, so
that two tokens change places over twice of it, and behind that the answers have nothing in common.
So each token of the doubtful answer, and of the first one, is looked at below its own prefix: if it
was the greedy choice of these weights, it is within twice the tolerance of the best, and the
answer's own best log-probability is that best within the tolerance. The first one too, because
weights that have become others since would call the doubtful one right.

What this does not show: how often other weights pass; on a random model many tokens nearly tie.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_graft.bench import gate

MOST_KEPT = 20
Force = Callable[[str, list[int]], Awaitable[list[tuple[float, float]]]]
"""Own and best log-probabilities of an answer's ids, by the weights of a folder's name."""


@dataclass(slots=True)
class Doubts:
    """Of one controller. Until it is judged, a doubt is a problem."""

    dtype: str
    kept: list[dict[str, Any]] = field(default_factory=list)
    others: int = 0
    """Beyond MOST_KEPT: never judged."""

    def add(self, text: str, origin: str, first: gate.Row, answer: gate.Row) -> None:
        """An answer of the folder `origin` that does not agree with the first one."""
        if len(self.kept) == MOST_KEPT:
            self.others += 1
            return
        self.kept.append({"text": text, "origin": origin, "first": first, "answer": answer})

    async def judge(self, force: Force) -> None:
        """Look at each of them again. Raises what `force` raises."""
        for doubt in self.kept:
            if "gap" not in doubt:
                rows = (doubt["first"], doubt["answer"])
                far = [_distance(row, await force(doubt["origin"], row["ids"])) for row in rows]
                doubt |= {name: max(one[name] for one in far) for name in far[0]}

    def problems(self) -> list[str]:
        """Doubts that are not explained."""
        limit = gate.TOLERANCE[self.dtype]
        found = []
        for doubt in self.kept:
            if "gap" not in doubt:
                found.append(f"{doubt['text']}; not judged yet")
            elif doubt["gap"] > 2 * limit or doubt["difference"] > limit:
                far = f"{doubt['gap']:.3f} from the best, {doubt['difference']:.3f} from its own"
                found.append(f"{doubt['text']}; judged when all was quiet, a token is {far}")
        if self.others:
            found.append(f"{self.others} more answers like these")
        return found


def _distance(answer: gate.Row, forced: list[tuple[float, float]]) -> dict[str, float]:
    reported = [step[0] for step in answer["best"]]
    return {
        "gap": max(best - own for own, best in forced),
        "difference": max(
            abs(best - mine) for (_, best), mine in zip(forced, reported, strict=True)
        ),
    }
