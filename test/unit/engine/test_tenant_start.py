"""What a start with a tenants file needs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_graft.engine import tenant_start
from sglang_graft.tenants import make_key


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {acme: {keys: ['" + make_key()[1] + "']}}")
    return str(file)


def arguments(**changes: Any) -> Any:
    plain = {"api_key": None, "admin_api_key": "admin", "is_embedding": False}
    return SimpleNamespace(**plain | {"enable_custom_logit_processor": False} | changes)


def test_a_good_file(path: str) -> None:
    assert list(tenant_start.check(path, arguments())) == ["acme"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"admin_api_key": None}, "wants --admin-api-key"),
        ({"api_key": "x"}, "--api-key: every tenant has a key"),
        ({"is_embedding": True}, "--is-embedding"),
        ({"enable_custom_logit_processor": True}, "--enable-custom-logit-processor: it runs code"),
    ],
)
def test_what_cannot_be_combined(path: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tenant_start.check(path, arguments(**changes))


def test_a_bad_file_or_another_server(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--graft-tenants: .*none: No such file"):
        tenant_start.check(path + "none", arguments())
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(ValueError, match="SGLANG_RUST_SERVER"):
        tenant_start.check(path, arguments())
