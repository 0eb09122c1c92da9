"""SGLang swallows a plugin's exception; where Graft was asked for, it must not start without it."""

import pytest
import sglang

from sglang_graft import config
from sglang_graft.engine.activate import activate
from sglang_graft.engine.hooks import HookError


@pytest.fixture(autouse=True)
def another_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "__version__", "0.0.1")
    monkeypatch.delenv(config.CONFIG_ENV, raising=False)
    monkeypatch.delenv("GRAFT_ENABLE", raising=False)


def test_a_plain_start_goes_on() -> None:
    with pytest.raises(HookError, match=r"got 0\.0\.1"):
        activate()


def test_a_start_with_graft_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_ENABLE", "1")
    with pytest.raises(SystemExit, match=r"got 0\.0\.1"):
        activate()


def test_a_child_of_a_server_with_graft_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.CONFIG_ENV, config.GraftConfig(enable=True).model_dump_json())
    with pytest.raises(SystemExit, match=r"got 0\.0\.1"):
        activate()
