"""The gate before every route: keys, names, rates; and what the file may do while it is watched."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from sglang_graft.serving import tenants
from sglang_graft.serving.control import RefusedOperationError
from sglang_graft.serving.tenant_gate import TenantGate, wanted
from sglang_graft.serving.tenants import Tenants
from sglang_graft.tenants import make_key, parse

MANAGER = SimpleNamespace(
    served_model_name="base", server_args=SimpleNamespace(model_path="models/base")
)
KEYS = {name: make_key() for name in ("acme", "slow")}
TEXT = json.dumps(
    {
        "tenants": {
            "acme": {"keys": [KEYS["acme"][1]], "adapters": ["legal/*"]},
            "slow": {
                "keys": [KEYS["slow"][1]],
                "base": True,
                "requests_per_second": 0.001,
                "burst_seconds": 1000,
            },
        }
    }
)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tenants]:
    made = Tenants(Path("tenants.json"), parse(TEXT, "tenants.json"))
    monkeypatch.setattr(Tenants, "start", lambda self, manager: None)
    tenants.set_current(made)
    yield made
    tenants.set_current(None)
    tenants.set_caller(None)


@pytest.fixture
def client(state: Tenants) -> Iterator[TestClient]:
    app = FastAPI(openapi_url=None)

    @app.websocket("/v1/realtime")
    async def realtime(ws: WebSocket) -> None:
        await ws.accept()

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def echo(request: Request) -> Any:
        return {
            "tenant": tenants.tenant_now(),
            "body": (await request.body()).decode(errors="replace"),
        }

    keys = ("operator", "own")
    app.add_middleware(TenantGate, state=state, manager=lambda: MANAGER, operator_keys=keys)
    with TestClient(app) as made:
        yield made


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name][0] if name in KEYS else name}"}


def test_who_asks_is_known_to_the_handler(client: TestClient) -> None:
    body = {"lora_path": "legal/a", "pad": "x" * 100_000}
    answer = client.post("/generate", json=body, headers=bearer("acme"))
    assert answer.json()["tenant"] == "acme"
    assert json.loads(answer.json()["body"]) == body
    for key in ("operator", "own"):
        answer = client.post("/load_lora_adapter", headers=bearer(key))
        assert answer.json()["tenant"] is None


def test_a_caller_does_not_stay_for_the_next_request(client: TestClient) -> None:
    assert client.get("/v1/models", headers=bearer("acme")).json()["tenant"] == "acme"
    assert client.get("/health").json()["tenant"] is None


@pytest.mark.parametrize("path", ["/generate", "/v1/models", "/graft/pool", "/none", "/healthy"])
def test_without_a_known_key_nothing_answers(client: TestClient, path: str) -> None:
    for headers in ({}, bearer("wrong"), {"X-Api-Key": ""}, {"Authorization": "Bearer "}):
        answer = client.post(path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/metrics", "/server_info", "/v1/loads", "/graft/pool", "/abort_request", "/new/route"]
)
def test_what_is_not_a_tenants_is_403(client: TestClient, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        assert client.request(method, path, headers=bearer("acme")).status_code == 403


def test_websockets_are_refused(client: TestClient) -> None:
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
        pass


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "legal/a"}, 200),
        ({"model": "base:legal/a"}, 200),
        ({"model": "legal/a/b"}, 403),
        ({"model": "sales"}, 403),
        ({"model": "base:sales"}, 403),
        ({"model": "base"}, 403),
        ({"model": "default", "lora_path": "legal/a"}, 200),
        ({"model": "legal/a", "lora_path": "sales"}, 200),
        ({"lora_path": ["legal/a", "legal/b"]}, 200),
        ({"lora_path": ["legal/a", "sales"]}, 403),
        ({"lora_path": ["legal/a", None]}, 403),
        ({"lora_name": "sales"}, 403),
        ({"parameters": {"lora_path": "sales"}}, 403),
        ({"parameters": {"lora_path": "legal/a"}}, 200),
        ({}, 403),
    ],
)
def test_names_in_a_body(client: TestClient, body: dict[str, Any], status: int) -> None:
    answer = client.post("/generate", json=body, headers=bearer("acme"))
    assert answer.status_code == status, answer.text


def test_a_body_that_is_no_object_is_the_handlers_to_refuse(client: TestClient) -> None:
    for content in (b"[1", b"3", b"\xff", b"", b"[" * 100_000):
        answer = client.post("/generate", content=content, headers=bearer("acme"))
        assert answer.status_code == 200, "the handler of this test answers everything"


def test_routes_without_a_model_look_at_no_name(client: TestClient) -> None:
    answer = client.post("/tokenize", json={"prompt": "x"}, headers=bearer("acme"))
    assert answer.status_code == 200


def test_rates_hold_for_what_computes(client: TestClient) -> None:
    assert client.post("/generate", json={}, headers=bearer("slow")).status_code == 200
    answer = client.post("/generate", json={}, headers=bearer("slow"))
    assert answer.status_code == 429
    assert 0 < int(answer.headers["Retry-After"]) <= 1000
    assert client.get("/v1/models", headers=bearer("slow")).status_code == 200


def test_names_that_an_alias_leads_to(state: Tenants) -> None:
    tenants.set_caller(tenants.Caller("acme"))
    assert not tenants.may_use("adapter-7")
    tenants.reach("sales", "adapter-7")
    assert not tenants.may_use("adapter-7"), "an alias that it may not use opens nothing"
    tenants.reach("legal/live", "adapter-7")
    assert tenants.may_use("adapter-7")
    tenants.set_caller(tenants.Caller("acme"))
    assert not tenants.may_use("adapter-7"), "only for that request"


def test_model_before_other_fields() -> None:
    assert list(wanted({"model": "x", "lora_path": "y"}, {"base"})) == [("x",)]
    assert list(wanted({"model": 3}, {"base"})) == [(None,)]


def test_a_changed_file_is_checked_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    async def ask(manager: Any, operation: str, **arguments: Any) -> dict[str, Any]:
        if arguments["tenants"].get("acme", {}).get("page_floor") == 9:
            raise RefusedOperationError("page_floor: too much")
        told.append(arguments["tenants"])
        return {}

    monkeypatch.setattr(tenants, "ask", ask)
    path = tmp_path / "t.json"
    path.write_text(TEXT)
    state = Tenants(path, parse(TEXT, "t"))
    key = KEYS["acme"][0]

    def look(text: str | None) -> None:
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        asyncio.run(state.look(None))

    asyncio.run(state.look(None))
    assert (len(told), state.changes, state.error) == (1, 0, None), "told once, to be sure"
    asyncio.run(state.look(None))
    assert len(told) == 1
    for text, error in (
        ("tenants: [", "not YAML"),
        (TEXT.replace('"adapters"', '"page_floor": 9, "adapters"'), "page_floor: too much"),
        (None, "No such file"),
    ):
        look(text)
        assert error in str(state.report()["error"])
        assert state.table.owner(key) == "acme"
        assert (len(told), state.changes) == (1, 0)
    look(TEXT.replace("legal/*", "sales"))
    assert (state.error, state.changes) == (None, 1)
    assert state.table.may_use("acme", "sales")
    look(json.dumps({"tenants": {}}))
    assert state.table.owner(key) is None
    assert told[-1] == {}
    assert key not in str(state.report())
