"""Marks on a request's way through SGLang's processes, for `bench_path.py`.

Python imports this module at its start where this folder is in PYTHONPATH. Targets (0.5.17): the
functions in `MARKED`. Each is wrapped as soon as its module has been imported, before any plugin
sees it, so what Graft's hooks add around a function counts to the part before or behind its mark.
A mark is a line in a file of its process below $PATH_MARKS: a name and `time.perf_counter()`, which
all processes of a Linux machine share. It costs a few microseconds.
"""

import functools
import importlib.abc
import importlib.util
import inspect
import os
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("PATH_MARKS", "")
_MANAGERS = "sglang.srt.managers."
# module: (function, mark at its start, mark at its end); "" is no mark.
MARKED = {
    _MANAGERS + "tokenizer_manager": (
        ("TokenizerManager.generate_request", "received", ""),
        ("TokenizerManager._send_one_request", "tokenized", ""),
        ("async_sock_recv", "", "answer back"),
    ),
    _MANAGERS + "scheduler": (
        ("Scheduler.process_input_requests", "scheduler", ""),
        ("Scheduler.run_batch", "batch", "launched"),
    ),
    "sglang.srt.model_executor.model_runner": (("ModelRunner.forward", "forward", ""),),
    _MANAGERS + "scheduler_components.output_sender": (
        ("SenderWrapper.send_output", "result", ""),
    ),
    _MANAGERS + "detokenizer_manager": (
        ("sock_recv", "", "detokenizer"),
        ("sock_send", "detokenized", ""),
    ),
}


@functools.cache
def _file() -> Any:
    """Of this process; a forked one has its parent's, whose lines are whole."""
    return open(os.path.join(FOLDER, str(os.getpid())), "a", buffering=1)


def _mark(name: str, arguments: tuple[Any, ...]) -> None:
    # The scheduler's loop looks for requests all the time.
    if name and not (name == "scheduler" and not arguments[1]):
        _file().write(f"{name}\t{time.perf_counter():.7f}\n")


def _wrapped(function: Any, start: str, end: str) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def stream(*args: Any, **more: Any) -> Any:
            _mark(start, args)
            async for item in function(*args, **more):
                yield item

        return stream
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wait(*args: Any, **more: Any) -> Any:
            _mark(start, args)
            found = await function(*args, **more)
            _mark(end, args)
            return found

        return wait

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        _mark(start, args)
        found = function(*args, **more)
        _mark(end, args)
        return found

    return call


def wrap(module: ModuleType) -> None:
    """Wrap what is marked in this module; AttributeError for what it has not."""
    for path, start, end in MARKED[module.__name__]:
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, module)
        setattr(owner, name, _wrapped(getattr(owner, name), start, end))


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the others find a marked module, and wraps it once it has been executed."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name not in MARKED:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            _after(spec)
        return spec


def _after(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        wrap(module)

    loader.exec_module = exec_module


if FOLDER:
    sys.meta_path.insert(0, _Finder())
