"""Routes that do not look for adapters must not answer for them."""

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.testclient import TestClient

from sglang_graft.serving.guard import ROUTES, ModelGuard
from sglang_graft.serving.on_demand import OnDemand

MANAGER = SimpleNamespace(
    lora_ref_cache={"legal": 1},
    served_model_name="base-model",
    server_args=SimpleNamespace(model_path="models/base"),
)


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    MANAGER._graft_on_demand = OnDemand([], 1.0, object())  # type: ignore[arg-type]
    for path in (*ROUTES, "/v1/chat/completions"):

        @app.api_route(path, methods=["POST", "PUT"])
        async def echo(request: Request) -> Any:
            return Response(await request.body())

    app.add_middleware(ModelGuard, manager=lambda: MANAGER)
    return TestClient(app)


@pytest.mark.parametrize("path", ROUTES)
def test_the_base_model_and_requests_without_a_model_pass(client: TestClient, path: str) -> None:
    for body in (
        {"model": "base-model", "x": "y" * 100_000},
        {"model": "default"},
        {},
        {"model": 3},
    ):
        assert client.post(path, json=body).json() == body


@pytest.mark.parametrize("path", ROUTES)
def test_an_unknown_name_is_404_and_lists_the_loaded(client: TestClient, path: str) -> None:
    response = client.post(path, json={"model": "legall"})
    assert response.status_code == 404
    assert "Loaded adapters: legal" in response.json()["error"]["message"]


@pytest.mark.parametrize("field", ["model", "lora_path", "lora_name"])
@pytest.mark.parametrize("path", ROUTES)
def test_an_adapter_is_refused_where_it_would_be_ignored(
    client: TestClient, path: str, field: str
) -> None:
    assert client.post(path, json={field: "legal"}).status_code == 400
    assert client.put(path, json={field: "legal"}).status_code == 400
    assert client.post(path, json={field: "legall"}).status_code == 404


@pytest.mark.parametrize("path", ROUTES)
def test_what_is_no_json_object_is_left_to_the_handler(client: TestClient, path: str) -> None:
    for body in (b"", b"[1]", b"{", b"[" * 100_000):
        assert client.post(path, content=body).content == body


def test_other_routes_are_not_read(client: TestClient) -> None:
    assert client.post("/v1/chat/completions", json={"model": "nobody"}).status_code == 200
