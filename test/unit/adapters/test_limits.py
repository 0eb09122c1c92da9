"""Files that are too large, hold too much, or would have something fetched."""

import json
import socket
from pathlib import Path

import helpers_peft as hp
import pytest
from format_table import CASES

from sglang_graft.adapters import AdapterError, read_adapter, weights
from sglang_graft.adapters.headers import Limits, check_headers

LIMITS = Limits(rank=64, nbytes=2**30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    next(case for case in CASES if case.id == "plain").make(tmp_path)
    return tmp_path


def test_a_config_larger_than_any_is_not_parsed(folder: Path) -> None:
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    config["revision"] = "x" * (2**20 - len(file.read_bytes()) - 100)
    file.write_text(json.dumps(config))
    read_adapter(folder, hp.tiny_spec())
    config["revision"] += "x" * 2000
    file.write_text(json.dumps(config))
    with pytest.raises(AdapterError, match="wanted at most 1048576 bytes"):
        read_adapter(folder, hp.tiny_spec())


def test_more_tensors_than_any_model_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_MOST_TENSORS", 1)
    for read in (
        lambda: read_adapter(folder, hp.tiny_spec()),
        lambda: check_headers(folder, hp.tiny_spec(), LIMITS),
    ):
        with pytest.raises(AdapterError, match=r"tensors: wanted at most 1, got \d+"):
            read()


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.test_id) for case in CASES if case.id == "C37"]
)
def test_C37_C74_no_name_in_a_config_is_looked_up(
    case: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.make(tmp_path)  # type: ignore[attr-defined]

    def connect(*_: object) -> None:
        raise AssertionError("something asks the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    check_headers(tmp_path, case.spec(), LIMITS)  # type: ignore[attr-defined]
    read_adapter(tmp_path, case.spec())  # type: ignore[attr-defined]
