"""Which adapter a program's next expressions ask for.

A choice is a context variable, so it belongs to the thread or task that made it. It is read where
an expression is appended, not where it is executed: SGLang executes in threads of its own.
"""

import copy
from contextvars import ContextVar, Token
from enum import Enum
from types import TracebackType
from typing import Any

from sglang.lang.ir import SglExpr


class Unset(Enum):
    """Nothing was chosen; None is a choice, the base model."""

    UNSET = "unset"


UNSET = Unset.UNSET
Choice = str | None | Unset
ATTRIBUTE = "_graft_adapter"
"""Of an expression: the choice made for it alone."""

chosen: ContextVar[Choice] = ContextVar("graft_adapter", default=UNSET)


def current() -> str | None:
    """The adapter that an expression appended here and now would ask for; None: the base model."""
    choice = chosen.get()
    return None if choice is UNSET else choice


def checked(name: Any) -> str | None:
    """`name` if it can name an adapter. Raises ValueError otherwise."""
    if name is None or (isinstance(name, str) and name):
        return name
    raise ValueError(f"adapter: wanted a name, or None for the base model, got {name!r}")


class adapter:
    """An adapter for a block, or for one expression.

    `with adapter("legal"):` holds for what is appended inside, to whichever state, and for programs
    that are started inside. `adapter("legal")(sgl.gen("x"))` holds for that expression, and wins
    over the block. None is the base model. Raises ValueError for what is no name.
    """

    def __init__(self, name: str | None) -> None:
        self.name = checked(name)
        self._tokens: list[Token[Choice]] = []

    def __enter__(self) -> "adapter":
        self._tokens.append(chosen.set(self.name))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        chosen.reset(self._tokens.pop())

    def __call__(self, expression: Any) -> Any:
        """A copy of the expression, for this adapter."""
        if not isinstance(expression, SglExpr):
            raise ValueError(f"adapter: wanted an expression such as gen(...), got {expression!r}")
        made = copy.copy(expression)
        setattr(made, ATTRIBUTE, self.name)
        return made
