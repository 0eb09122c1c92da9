"""Operations that travel in a request that SGLang already has."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput

from sglang_graft.engine import control, report


def stock(scheduler: Any, request: Any) -> Any:
    return GetInternalStateReqOutput(internal_state={"stock": 1})


def refuse(scheduler: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("wanted pages, got none")


@pytest.fixture(autouse=True)
def operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(control.OPERATIONS, "echo", lambda scheduler, arguments: arguments)
    monkeypatch.setitem(control.OPERATIONS, "refuse", refuse)


def test_an_operation_is_run_with_its_arguments() -> None:
    message = control.message("echo", {"name": "käse", "pages": 3})
    result = control.answer(stock, SimpleNamespace(), message)
    assert result.internal_state == {control.REPLY: {"name": "käse", "pages": 3}}


def test_a_refusal_goes_back_with_its_reason() -> None:
    result = control.answer(stock, SimpleNamespace(), control.message("refuse", {}))
    assert result.internal_state == {control.ERROR: "wanted pages, got none"}


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(KeyError):
        control.answer(stock, SimpleNamespace(), control.message("unknown", {}))


@pytest.mark.parametrize("rid", [None, "some-request"])
def test_a_plain_request_gets_the_reports(rid: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "reports", lambda cache: {report.KEY: cache})
    result = control.answer(stock, SimpleNamespace(tree_cache=7), GetInternalStateReq(rid=rid))
    assert result.internal_state == {"stock": 1, report.KEY: 7}
