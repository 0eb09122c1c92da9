"""What one row of the format table is: a way to make a folder, and what has to become of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import helpers_peft as hp

from sglang_graft.adapters import ModelSpec

# Writes an adapter folder. For an applied case it returns the PEFT model that it has to equal; for
# a refused one the model whose base weights are at hand, or None.
Make = Callable[[Path], Any]


@dataclass(frozen=True, kw_only=True)
class FormatCase:
    """`id` names the test. `refused` is part of the message, None when the adapter is applied.

    `warnings` are parts of the sentences that reading has to return, in order. `spec` makes the
    base model that the folder is read for.
    """

    id: str
    feature: str
    make: Make
    refused: str | None = None
    warnings: tuple[str, ...] = ()
    spec: Callable[[], ModelSpec] = field(default=hp.tiny_spec)
    variant: str = ""

    @property
    def test_id(self) -> str:
        return f"{self.id}-{self.variant}" if self.variant else self.id


class FormatCases(list[FormatCase]):
    """A list that functions are added to by decoration."""

    def case(
        self, id: str, feature: str, *, each: dict[str, Any] | None = None, **expected: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """One case, or one for every value of `each`, which the function then gets second."""

        def add(make: Callable[..., Any]) -> Callable[..., Any]:
            if each is None:
                self.append(FormatCase(id=id, feature=feature, make=make, **expected))
                return make
            for variant, value in each.items():
                bound = _bind(make, value)
                self.append(
                    FormatCase(id=id, feature=feature, make=bound, variant=variant, **expected)
                )
            return make

        return add


def _bind(make: Callable[..., Any], value: Any) -> Make:
    return lambda folder: make(folder, value)
