"""Expressions keep the adapter under which they were appended.

Targets (0.5.17): AROUND `lang.interpreter.StreamExecutor.submit`, which the program's thread calls
for each expression, and AROUND `StreamExecutor._execute`, which runs it later in the executor's own
thread. Reason: by then the block that chose the adapter has long ended.
"""

from collections.abc import Callable
from typing import Any

from sglang.lang.ir import SglExprList

from sglang_graft.engine.hooks import Hook
from sglang_graft.lang.choice import ATTRIBUTE, UNSET, chosen
from sglang_graft.lang.endpoint import EXECUTOR_ATTRIBUTE, Endpoint
from sglang_graft.lang.programs import needs_endpoint


def submit(original: Callable[..., Any], self: Any, expr: Any) -> Any:
    """AROUND `submit`: a list of one that carries the choice. SGLang looks into lists by itself."""
    choice = chosen.get()
    if choice is UNSET:
        return original(self, expr)
    if choice is not None and not isinstance(self.backend, Endpoint):
        raise needs_endpoint(self.backend, choice)
    carrier = SglExprList([expr])
    setattr(carrier, ATTRIBUTE, choice)
    return original(self, carrier)


def execute(original: Callable[..., Any], self: Any, other: Any) -> Any:
    """AROUND `_execute`, which calls itself for the parts of a list: the innermost choice wins."""
    choice = getattr(other, ATTRIBUTE, UNSET)
    if choice is UNSET:
        return original(self, other)
    if choice is not None and not isinstance(self.backend, Endpoint):
        raise needs_endpoint(self.backend, choice)
    before = getattr(self, EXECUTOR_ATTRIBUTE, UNSET)
    setattr(self, EXECUTOR_ATTRIBUTE, choice)
    try:
        return original(self, other)
    finally:
        setattr(self, EXECUTOR_ATTRIBUTE, before)


HOOKS = (
    Hook(
        target="sglang.lang.interpreter.StreamExecutor.submit",
        kind="around",
        function=submit,
        parameters=("self", "expr"),
        reason="an expression keeps the adapter of the block that it was appended in",
    ),
    Hook(
        target="sglang.lang.interpreter.StreamExecutor._execute",
        kind="around",
        function=execute,
        parameters=("self", "other"),
        reason="requests of an expression ask for its adapter",
    ),
)
