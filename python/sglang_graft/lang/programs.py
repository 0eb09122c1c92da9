"""The option `adapter` of a program's `run` and `run_batch`, and where a program starts from.

Targets (0.5.17):
- AROUND `lang.ir.SglFunction.run` and `run_batch`. Reason: a choice has to reach threads that
  SGLang starts, so it goes with the backend: `Endpoint.using`;
- AROUND `lang.interpreter.run_internal`, which calls the program, in the caller's thread or in one
  of its own. Reason: a block around `run`, or around the iteration over a batch, must not show
  inside; a program that another one starts begins with the adapter of its caller.
"""

from collections.abc import Callable
from typing import Any

from sglang.global_config import global_config

from sglang_graft.engine.hooks import Hook
from sglang_graft.lang.choice import UNSET, Choice, checked, chosen
from sglang_graft.lang.endpoint import Endpoint

OPTION = "adapter"


def needs_endpoint(backend: Any, name: str | None) -> ValueError:
    """The error of a choice that the backend would ignore."""
    return ValueError(
        f"adapter {name!r}: wanted sglang_graft.lang.Endpoint(URL) as the backend, got"
        f" {type(backend).__name__}, which asks for no adapter"
    )


def backend_for(choice: Choice, backend: Any) -> Any:
    """The backend with `choice`. Raises ValueError when it cannot ask for adapters."""
    backend = backend or global_config.default_backend
    backend = getattr(backend, "endpoint", backend)  # that of a Runtime
    if choice is UNSET:
        choice = chosen.get()
    if choice is UNSET or (choice is None and not isinstance(backend, Endpoint)):
        return backend
    if not isinstance(backend, Endpoint):
        raise needs_endpoint(backend, choice)
    return backend.using(choice)


def run(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `run` and `run_batch`. A program's own parameter `adapter` stays its own."""
    choice: Choice = UNSET
    if OPTION in kwargs and OPTION not in self.arg_names:
        choice = checked(kwargs.pop(OPTION))
    return original(self, *args, **kwargs | {"backend": backend_for(choice, kwargs.get("backend"))})


def start(original: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `run_internal`: the program's choice is that of its backend."""
    token = chosen.set(getattr(state.stream_executor.backend, "adapter", UNSET))
    try:
        return original(state, *args, **kwargs)
    finally:
        chosen.reset(token)


_SAMPLING = (
    *("max_new_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p"),
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "ignore_eos", "return_logprob"),
    *("logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"),
)
_REASON = "choose an adapter for a program"

HOOKS = (
    Hook(
        target="sglang.lang.ir.SglFunction.run",
        kind="around",
        function=run,
        parameters=("self", "args", *_SAMPLING, "stream", "backend", "use_thread", "kwargs"),
        reason=_REASON,
    ),
    Hook(
        target="sglang.lang.ir.SglFunction.run_batch",
        kind="around",
        function=run,
        parameters=(
            *("self", "batch_kwargs", *_SAMPLING),
            *("backend", "num_threads", "progress_bar", "generator_style"),
        ),
        reason=_REASON,
    ),
    Hook(
        target="sglang.lang.interpreter.run_internal",
        kind="around",
        function=start,
        parameters=("state", "program", "func_args", "func_kwargs", "sync"),
        reason="a program starts from its own adapter, whatever surrounds it",
    ),
)
