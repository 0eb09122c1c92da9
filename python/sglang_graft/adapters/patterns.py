"""Regular expressions out of a config: someone else's programs, so their cost is bounded first.

`re` backtracks, so `(.*)*x` would try 2^n ways to match a path of n characters and nothing could
stop it. Each expression is therefore priced from its syntax tree before it runs: the number of ways
in which it can split a path. Choices multiply along a sequence and add up over alternatives; a
repeated group that holds a choice has no bound. Expressions of one config share a budget.
"""

import math
import re
from itertools import pairwise
from pathlib import Path
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from sglang_graft.adapters.errors import AdapterError, show

_PATH = 64  # characters; module paths are shorter
_BUDGET = 2**25  # four free stretches (.*) in a row, and some: seconds for a large model
_EACH = 2**12  # a plain name costs time too, once for each module
_CHARACTER = 2**6  # and so does reading it
_REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT)


class PatternReader:
    """Compiles the expressions of one config, as long as they can be matched in bounded time."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._left: float = _BUDGET

    def compile(self, item: str, text: str, around: str = "{}") -> re.Pattern[str]:
        """`text`, set into `around`, compiled. Raises AdapterError for a bad or a costly one."""
        self._spend(item, text, _EACH + _CHARACTER * len(text))
        try:
            cost = _cost(parser.parse(text))
            compiled = re.compile(around.replace("{}", text))
        # The other two are what nesting and repeat counts without end come to.
        except (re.error, RecursionError, OverflowError) as error:
            raise AdapterError(
                self._file, item, f"{show(text)} is not a regular expression: {error}"
            ) from error
        self._spend(item, text, cost)
        return compiled

    def _spend(self, item: str, text: str, cost: float) -> None:
        self._left -= cost
        if self._left < 0:
            raise AdapterError(
                self._file,
                item,
                f"{show(text)} could take too long to match; use fewer patterns, fewer repetitions "
                "in a row, and none inside a repeated group",
            )


def _cost(tree: Any) -> float:
    """Upper bound of the ways to match a sequence, 1 for one that leaves no choice."""
    return math.prod(_cost_of(op, value) for op, value in tree)


def _cost_of(op: Any, value: Any) -> float:
    if op in _REPEATS:
        return _cost_of_repeat(*value)
    if op is ops.BRANCH:
        branches = value[1]
        return 1.0 if _exclusive(branches) else sum(_cost(branch) for branch in branches)
    if op is ops.SUBPATTERN:
        return _cost(value[3])
    if op in (ops.ASSERT, ops.ASSERT_NOT):
        return _cost(value[1])
    if op is ops.ATOMIC_GROUP:
        return _cost(value)
    if op is ops.GROUPREF_EXISTS:
        return _cost(value[1]) + (_cost(value[2]) if value[2] else 1)
    return 1


def _cost_of_repeat(low: int, high: int, body: Any) -> float:
    inner = _cost(body)
    if high > 1 and inner > 1:
        return math.inf
    empty = body.getwidth()[0] == 0  # then `low` rounds are made without getting anywhere
    rounds = low if empty and low > 1 else 1
    return float(inner * rounds * (min(high, _PATH) - min(low, _PATH) + 1))


def _exclusive(branches: list[Any]) -> bool:
    """Are these plain words, at most one of which can match at any place?"""
    words = []
    for branch in branches:
        if any(op is not ops.LITERAL for op, _ in branch):
            return False
        words.append([value for _, value in branch])
    words.sort()
    # In sorted order a word is followed directly by one that it begins, if there is any.
    return all(later[: len(word)] != word for word, later in pairwise(words))
