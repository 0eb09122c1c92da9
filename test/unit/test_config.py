"""The option table: flags before environment before defaults, bad values by name."""

import os
from pathlib import Path

import pytest

from sglang_graft import config


def test_defaults_leave_graft_off() -> None:
    assert config.resolve({}, {}) == config.GraftConfig()
    assert not config.GraftConfig().enable
    assert config.GraftConfig().policy == "cost"


def test_flag_wins_over_environment() -> None:
    environ = {"GRAFT_ENABLE": "1", "GRAFT_POLICY": "other"}
    resolved = config.resolve({"policy": "lru"}, environ)
    assert (resolved.enable, resolved.policy) == (True, "lru")


def test_a_bad_value_names_flag_and_environment() -> None:
    with pytest.raises(ValueError, match=r"--enable-graft \(or GRAFT_ENABLE\): .*'maybe'"):
        config.resolve({}, {"GRAFT_ENABLE": "maybe"})


def test_names_are_unique_and_follow_one_pattern() -> None:
    rows = config.option_table()
    assert len({row.env for row in rows}) == len({row.flag for row in rows}) == len(rows)
    assert {row.env for row in rows} == {
        *("GRAFT_ENABLE", "GRAFT_POLICY", "GRAFT_CHECK", "GRAFT_ADAPTER_ROOT"),
        *("GRAFT_ADAPTER_SCAN_SECONDS", "GRAFT_MAX_ADAPTERS", "GRAFT_MAX_ADAPTER_MB"),
        *("GRAFT_HOST_MEMORY_GB", "GRAFT_NO_HOST_KV", "GRAFT_NO_PREFETCH"),
        *("GRAFT_IDLE_PROMOTION", "GRAFT_METRICS_ADAPTERS", "GRAFT_TENANTS"),
        *("GRAFT_WARM", "GRAFT_DRAIN_SECONDS"),
        *("GRAFT_DRAIN_NOTICE_SECONDS", "GRAFT_REQUEST_LOG"),
    }


def test_numbers_come_from_text_and_have_bounds() -> None:
    resolved = config.resolve({"max_adapters": "7"}, {"GRAFT_ADAPTER_SCAN_SECONDS": "0.5"})
    assert (resolved.max_adapters, resolved.adapter_scan_seconds) == (7, 0.5)
    for flag, value in (
        ("max_adapters", "0"),
        ("adapter_scan_seconds", "0"),
        ("max_adapter_mb", "x"),
    ):
        with pytest.raises(ValueError, match=flag.replace("_", "-")):
            config.resolve({flag: value}, {})


def test_adapter_roots_are_a_search_path() -> None:
    assert config.GraftConfig().adapter_roots == ()
    resolved = config.resolve({}, {"GRAFT_ADAPTER_ROOT": f"a{os.pathsep}b/c{os.pathsep}"})
    assert resolved.adapter_roots == (Path("a"), Path("b/c"))


def test_a_size_below_zero_is_refused_with_its_flag() -> None:
    with pytest.raises(ValueError, match=r"--graft-host-memory-gb \(or GRAFT_HOST_MEMORY_GB\)"):
        config.resolve({"host_memory_gb": "-1"}, {})


def test_published_options_arrive_and_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.CONFIG_ENV, "")
    chosen = config.GraftConfig(enable=True, check=True)
    config.publish(chosen)
    assert config.published() == chosen
    config.publish(config.GraftConfig())
    assert config.published() is None


def test_an_empty_variable_is_not_set() -> None:
    assert config.resolve({}, {"GRAFT_ENABLE": "", "GRAFT_POLICY": ""}) == config.GraftConfig()
