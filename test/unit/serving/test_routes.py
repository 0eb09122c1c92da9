"""Our routes stand in the place of SGLang's, with the same protection."""

from typing import Any

import pytest
from fastapi import FastAPI
from sglang.srt.managers.io_struct import LoRAUpdateOutput
from sglang.srt.utils.auth import AuthLevel, _get_auth_level_from_app_and_scope
from starlette.testclient import TestClient

from sglang_graft.serving import routes


def test_the_route_takes_load_inplace(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.entrypoints import http_server

    seen: list[Any] = []

    class Manager:
        async def load_lora_adapter(self, obj: Any, _: Any) -> Any:
            seen.append(obj)
            return LoRAUpdateOutput(success=False, error_message="no")

    app = FastAPI()

    @app.get(routes.MODEL_PATH)
    @app.post(routes.LOAD_PATH)
    async def stock() -> None:
        raise AssertionError("SGLang's own route was asked")

    state = type("State", (), {"tokenizer_manager": Manager()})
    monkeypatch.setattr(http_server, "_global_state", state)
    routes.replace_routes(app)
    client = TestClient(app)
    body = {"lora_name": "legal", "lora_path": "here", "load_inplace": True, "unknown": 1}
    response = client.post(routes.LOAD_PATH, json=body)
    assert (response.status_code, response.json()["error_message"]) == (400, "no")
    assert (seen[0].lora_name, seen[0].load_inplace, seen[0].pinned) == ("legal", True, False)
    assert client.post(routes.LOAD_PATH, json=body | {"load_inplace": "x"}).status_code == 422
    scope = {"type": "http", "method": "POST", "path": routes.LOAD_PATH, "headers": []}
    assert _get_auth_level_from_app_and_scope(app, scope) is AuthLevel.ADMIN_OPTIONAL
