"""A hook counts only when it is live and its target is what it was written against."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from sglang_graft.engine import flags, scheduler
from sglang_graft.engine.hooks import Hook, HookError, problem, verify
from sglang_graft.serving import install


def hook(kind: str = "after", function: Any = None, **changes: Any) -> Hook:
    values = {"target": "fake_host.run", "parameters": ("a", "b"), "reason": "test"} | changes
    return Hook(kind=kind, function=function or print, **values)  # type: ignore[arg-type]


@pytest.fixture
def host() -> Iterator[types.ModuleType]:
    module = types.ModuleType("fake_host")

    def run(a: int, b: int) -> int:
        return a + b

    class Part:
        def __init__(self, a: int, b: int) -> None: ...

    module.run, module.Part = run, Part  # type: ignore[attr-defined]
    sys.modules["fake_host"] = module
    yield module
    del sys.modules["fake_host"]


def patch(host: types.ModuleType, *hooks: Hook) -> None:
    for one in hooks:
        host.run = _wrap_fn(host.run, one.function, HookType(one.kind))  # type: ignore[attr-defined]


def test_a_hook_that_was_never_applied_is_named(host: types.ModuleType) -> None:
    with pytest.raises(HookError, match=r"fake_host\.run: the hook is not live .*test"):
        verify([hook()])


@pytest.mark.parametrize("kind", ["before", "after", "around"])
def test_a_live_hook_passes_below_hooks_of_others(host: types.ModuleType, kind: str) -> None:
    ours, other = hook(kind, lambda *a: None), hook("after", lambda *a: None)
    patch(host, ours, other)
    verify([ours])


def test_a_live_hook_on_a_changed_target_is_named(host: types.ModuleType) -> None:
    ours = hook(parameters=("a", "c"))
    patch(host, ours)
    with pytest.raises(HookError, match=r"wanted parameters \('a', 'c'\), got \('a', 'b'\)"):
        verify([ours])


def test_a_missing_target_is_named(host: types.ModuleType) -> None:
    assert "fake_host.gone: not found" in str(problem(hook(target="fake_host.gone")))


def test_a_class_is_live_when_it_stands_there(host: types.ModuleType) -> None:
    ours = type("Ours", (host.Part,), {})
    one = hook("replace", ours, target="fake_host.Part")
    assert "not live" in str(problem(one))
    host.Part = ours  # type: ignore[attr-defined]
    assert problem(one) is None


def test_every_target_exists_with_the_expected_parameters() -> None:
    hooks = (*flags.HOOKS, *install.HOOKS, *scheduler.HOOKS)
    assert [text for one in hooks if (text := problem(one, live=False))] == []
