"""Our flags on SGLang's parser."""

import argparse

import pytest

from sglang_graft import config
from sglang_graft.engine import flags
from sglang_graft.engine.hooks import HookError


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    flags.add_flags(None, made)
    return made


@pytest.fixture
def live_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "verify", lambda hooks: None)


@pytest.mark.usefixtures("live_hooks")
def test_flags_are_recorded_and_leave_no_trace_in_the_namespace() -> None:
    namespace = parser().parse_args(["--enable-graft", "--graft-policy", "lru"])
    assert flags._flags == {"enable": True, "policy": "lru"}
    assert vars(namespace) == {}


@pytest.mark.usefixtures("live_hooks")
def test_a_new_command_line_owes_nothing_to_the_one_before() -> None:
    parser().parse_args(["--enable-graft"])
    parser().parse_args([])
    assert flags._flags == {}


def test_a_flag_that_could_not_take_effect_is_an_error() -> None:
    with pytest.raises(HookError, match="refuses to start"):
        parser().parse_args(["--enable-graft"])


def test_actions_are_those_that_sglangs_config_files_know() -> None:
    actions = [a for a in parser()._actions if "graft" in a.option_strings[-1]]
    assert len(actions) == len(config.option_table())
    known = (argparse._StoreTrueAction, argparse._StoreAction)
    assert all(isinstance(action, known) for action in actions)
    assert [action.dest for action in actions][:1] == ["enable_graft"]
