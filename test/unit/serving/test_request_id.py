"""X-Request-Id: a client's own comes back, and the request's state knows it."""

import re
from types import SimpleNamespace

import pytest
from fastapi import FastAPI, Response
from starlette.testclient import TestClient

from sglang_graft.serving import request_id
from sglang_graft.serving.request_id import ATTRIBUTE, RequestId, accepted


@pytest.fixture
def states() -> dict[str, SimpleNamespace]:
    return {}


@pytest.fixture
def client(states: dict[str, SimpleNamespace]) -> TestClient:
    app = FastAPI()

    @app.get("/ask")
    async def ask(fail: bool = False) -> str:
        states["r"] = SimpleNamespace()
        request_id.note({"r": object()}, SimpleNamespace(rid_to_state=states), None)
        assert not fail
        return "answer"

    app.add_middleware(RequestId)
    return TestClient(app, raise_server_exceptions=False)


def test_a_clients_id_comes_back(client: TestClient, states: dict[str, SimpleNamespace]) -> None:
    answer = client.get("/ask", headers={"X-Request-Id": "trace/1:2"})
    assert answer.headers["x-request-id"] == "trace/1:2"
    assert getattr(states["r"], ATTRIBUTE) == "trace/1:2"


@pytest.mark.parametrize("header", ["", "a b", "a" * 129, "a\tb", 'a"b'])
def test_what_must_not_stand_in_a_log_is_replaced(client: TestClient, header: str) -> None:
    assert re.fullmatch(r"[0-9a-f]{32}", accepted(header))
    answer = client.get("/ask", headers={"X-Request-Id": header})
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])


def test_without_a_header_each_request_has_another(client: TestClient) -> None:
    assert len({client.get("/ask").headers["x-request-id"] for _ in range(3)}) == 3
    assert "x-request-id" in client.get("/nowhere").headers


def test_a_route_cannot_answer_with_another_id() -> None:
    app = FastAPI()

    @app.get("/ask")
    async def ask(response: Response) -> None:
        response.headers["X-Request-Id"] = "its own"
        response.headers["X-Other"] = "stays"

    app.add_middleware(RequestId)
    headers = TestClient(app).get("/ask", headers={"X-Request-Id": "the client's"}).headers
    assert headers.get_list("x-request-id") != ["its own"]
    assert len(headers.get_list("x-request-id")) == 1
    assert headers["x-other"] == "stays"


def test_outside_of_a_request_nothing_is_noted() -> None:
    state = SimpleNamespace()
    request_id.note({"r": object()}, SimpleNamespace(rid_to_state={"r": state}), None)
    assert vars(state) == {}
