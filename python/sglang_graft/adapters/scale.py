"""Rank and scale of each module, resolved as PEFT resolves them."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sglang_graft.adapters.config import LoraConfig
from sglang_graft.adapters.errors import show
from sglang_graft.adapters.patterns import PatternReader

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class _Entry(Generic[_Number]):
    key: str
    pattern: re.Pattern[str]
    value: _Number


class ScaleRule:
    """Resolves rank and scale of full module paths such as "model.layers.0.mlp.up_proj".

    The rule of both patterns: keys are regular expressions, tried in file order. A key has to cover
    the end of the path, from a dot or from the very start. The first that does gives the value;
    without one the config's own `r` or `lora_alpha` holds. Raises AdapterError for a key that is
    not a regular expression, or too costly a one.
    """

    def __init__(self, config: LoraConfig) -> None:
        self._config = config
        reader = PatternReader(config.file)
        self._ranks = _compile(reader, "rank_pattern", config.rank_pattern)
        self._alphas = _compile(reader, "alpha_pattern", config.alpha_pattern)

    def rank(self, module: str) -> int:
        """The rank that the config gives to `module`."""
        return _first(self._ranks, module, self._config.rank)

    def scale(self, module: str) -> float:
        """alpha / rank, or alpha / sqrt(rank) for rank-stabilised LoRA."""
        rank = self.rank(module)
        alpha = _first(self._alphas, module, self._config.alpha)
        return alpha / math.sqrt(rank) if self._config.use_rslora else alpha / rank

    def unused_keys(self, modules: Sequence[str]) -> list[str]:
        """A sentence for each pattern key that matches none of `modules` (a typo, as a rule)."""
        named = [("rank_pattern", entry.key, entry.pattern) for entry in self._ranks]
        named += [("alpha_pattern", entry.key, entry.pattern) for entry in self._alphas]
        return [
            f"{name}: key {show(key)} matches no module of the adapter and has no effect"
            for name, key, pattern in named
            if not any(pattern.match(module) for module in modules)
        ]


def _compile(
    reader: PatternReader, name: str, table: Mapping[str, _Number]
) -> list[_Entry[_Number]]:
    # Both groups capture, so that a numbered back-reference in a key counts as it does for PEFT.
    return [
        _Entry(key, reader.compile(f"{name}[{show(key)}]", key, around=r"(.*\.)?({})$"), value)
        for key, value in table.items()
    ]


def _first(entries: Iterable[_Entry[_Number]], module: str, default: _Number) -> _Number:
    for entry in entries:
        if entry.pattern.match(module):
            return entry.value
    return default
