"""Our flags on SGLang's parser."""

import argparse
import os
from pathlib import Path
from types import SimpleNamespace

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
def test_a_flag_that_repeats_becomes_one_search_path() -> None:
    parser().parse_args(["--graft-adapter-root", "a", "b", "--graft-adapter-root", "c"])
    assert flags._flags == {"adapter_root": os.pathsep.join("abc")}


def test_adapter_roots_are_folders(tmp_path: Path) -> None:
    flags._check_roots(config.GraftConfig(adapter_root=str(tmp_path)))
    with pytest.raises(ValueError, match=r"--graft-adapter-root: wanted folders, got .*nobody"):
        flags._check_roots(config.GraftConfig(adapter_root=f"{tmp_path}:{tmp_path}/nobody"))


def test_the_notice_is_a_part_of_the_drain() -> None:
    flags._check_drain(config.GraftConfig(drain_seconds=5, drain_notice_seconds=5))
    with pytest.raises(ValueError, match=r"--graft-drain-notice-seconds: wanted at most the 5 of"):
        flags._check_drain(config.GraftConfig(drain_seconds=5, drain_notice_seconds=6))


def test_adapters_named_at_start_count() -> None:
    started = SimpleNamespace(lora_paths=["a", "b"])
    flags._check_count(config.GraftConfig(max_adapters=2), started)
    flags._check_count(config.GraftConfig(), SimpleNamespace(lora_paths=None))
    with pytest.raises(ValueError, match=r"at most 1 adapters, got 2; raise --graft-max-adapters"):
        flags._check_count(config.GraftConfig(max_adapters=1), started)


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


@pytest.mark.usefixtures("live_hooks")
def test_an_unknown_policy_ends_the_start_with_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.CONFIG_ENV, raising=False)
    parser().parse_args(["--enable-graft", "--graft-policy", "mru"])
    args = SimpleNamespace()
    with pytest.raises(ValueError, match="--graft-policy: wanted one of cost, elora, lru; got"):
        flags.resolve_arguments(lambda server_args: None, args)
    monkeypatch.delenv(config.CONFIG_ENV, raising=False)


def graphs(decode: str | None, prefill: str | None) -> SimpleNamespace:
    return SimpleNamespace(cuda_graph_backend_decode=decode, cuda_graph_backend_prefill=prefill)


def test_graphs_that_no_device_can_capture_are_refused_not_dropped() -> None:
    for given in (graphs(None, None), graphs("disabled", None)):
        flags._disable_graphs(given)
        assert given == graphs("disabled", "disabled")
    with pytest.raises(ValueError, match="--cuda-graph-backend-prefill: wanted 'disabled'"):
        flags._disable_graphs(graphs(None, "breakable"))
