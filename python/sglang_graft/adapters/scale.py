"""Rank and scale of each module, resolved as PEFT resolves them."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sglang_graft.adapters.config import LoraConfig
from sglang_graft.adapters.errors import AdapterError

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
    not a regular expression.
    """

    def __init__(self, config: LoraConfig) -> None:
        self._config = config
        self._ranks = _compile(config, "rank_pattern", config.rank_pattern)
        self._alphas = _compile(config, "alpha_pattern", config.alpha_pattern)

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
            f"{name}: key {key!r} matches no module of the adapter and has no effect"
            for name, key, pattern in named
            if not any(pattern.match(module) for module in modules)
        ]


def _compile(config: LoraConfig, name: str, table: Mapping[str, _Number]) -> list[_Entry[_Number]]:
    entries = []
    for key, value in table.items():
        try:
            # Both groups capture, so that a numbered back-reference in a key counts as for PEFT.
            pattern = re.compile(r"(.*\.)?(" + key + r")$")
        except re.error as error:
            raise AdapterError(
                config.file, f"{name}[{key!r}]", f"is not a regular expression: {error}"
            ) from error
        entries.append(_Entry(key, pattern, value))
    return entries


def _first(entries: Iterable[_Entry[_Number]], module: str, default: _Number) -> _Number:
    for entry in entries:
        if entry.pattern.match(module):
            return entry.value
    return default
