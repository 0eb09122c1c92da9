"""Bodies and routes that stand in the place of SGLang's own."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import LoRAUpdateOutput
from starlette.testclient import TestClient

from sglang_graft.serving import client_bodies, vllm_routes
from sglang_graft.serving.client_routes import ROUTES, replace_routes, select
from sglang_graft.serving.on_demand import OnDemand

MESSAGES = [{"role": "user", "content": "x"}]


def manager(*loaded: str) -> Any:
    return SimpleNamespace(
        lora_ref_cache=dict.fromkeys(loaded, 1),
        served_model_name="base",
        server_args=SimpleNamespace(model_path="models/base"),
        _graft_on_demand=OnDemand([], 1.0, object()),  # type: ignore[arg-type]
    )


def chosen(**fields: Any) -> Any:
    return asyncio.run(select(manager("a", "b"), **({"model": None} | fields)))


def test_every_field_names_an_adapter() -> None:
    assert chosen() is chosen(model="base") is chosen(model="") is None
    assert chosen(model="a") == chosen(model="base:a") == chosen(lora_path="a") == "a"
    assert chosen(model="default", lora_name="a") == chosen(model="a", lora_name="a") == "a"
    assert chosen(lora_path=["a", None]) == ["a", None]


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"model": "a", "lora_name": "b"}, 400, "model names 'a' and lora_name names 'b'"),
        ({"model": "c", "lora_name": "b"}, 400, "model names 'c'"),
        ({"model": "c"}, 404, "'c' is loaded. Loaded adapters: a, b. Base: base"),
        ({"model": "base:c"}, 404, "'base:c'"),
        ({"lora_path": ["a", "c"]}, 404, "'c'"),
        ({"lora_name": "c"}, 404, "'c'"),
    ],
)
def test_others_are_refused(fields: dict[str, Any], status: int, text: str) -> None:
    with pytest.raises(HTTPException, match=str(status)) as error:
        chosen(**fields)
    assert error.value.status_code == status
    assert text in error.value.detail


def test_the_routes_stand_in_the_places_of_sglangs() -> None:
    app = FastAPI(openapi_url=None)
    app.router.route_class = http_server.ORJSONRoute
    stock = {}
    for route in http_server.app.router.routes:
        if getattr(route, "path", None) in ROUTES:
            app.router.routes.append(route)
            stock[route.path] = route.methods
    assert stock.keys() == ROUTES.keys()
    replace_routes(app)
    ours = {route.path: route for route in app.router.routes if isinstance(route, APIRoute)}
    for path, route in ours.items():
        assert route.endpoint is ROUTES[path][0]
        assert route.methods == stock[path]
        assert isinstance(route, http_server.ORJSONRoute)


def test_a_body_keeps_what_names_the_adapter() -> None:
    chat = client_bodies.ChatBody.model_validate({"messages": MESSAGES, "lora_name": "a"})
    assert (chat.lora_name, chat.lora_path) == ("a", None)
    native = TypeAdapter(client_bodies.GenerateBody).validate_python(
        {"text": "x", "model": "m", "lora_name": "a", "lora_path": ["b"]}
    )
    assert (native.model, native.lora_name, native.lora_path) == ("m", "a", ["b"])
    messages = {"model": "m", "messages": MESSAGES, "max_tokens": 1, "lora_path": "a"}
    assert client_bodies.MessagesBody.model_validate(messages).lora_path == "a"


@pytest.mark.parametrize("body", [None, 3, [], "x", {"response_format": "x", "messages": []}])
def test_a_body_of_another_type_is_a_validation_error(body: Any) -> None:
    with pytest.raises(ValidationError):
        client_bodies.ChatBody.model_validate(body)


class Loads:
    """A tokenizer manager that knows `a`."""

    def __init__(self) -> None:
        self.names = {"a"}
        self.lora_registry = SimpleNamespace(ref=lambda name: name if name in self.names else None)

    async def load_lora_adapter(self, obj: Any, request: Any) -> Any:
        assert request is not None, "this would be the operator's own program"
        if obj.lora_path == "broken":
            return LoRAUpdateOutput(success=False, error_message="it is broken")
        assert obj.load_inplace or obj.lora_name not in self.names
        self.names.add(obj.lora_name)
        return LoRAUpdateOutput(success=True, error_message="")

    async def unload_lora_adapter(self, obj: Any, request: Any) -> Any:
        known = obj.lora_name in self.names
        self.names.discard(obj.lora_name)
        return LoRAUpdateOutput(success=known, error_message="" if known else "is not loaded")


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    app = FastAPI()
    app.include_router(vllm_routes.router)
    state = SimpleNamespace(tokenizer_manager=Loads())
    monkeypatch.setattr(http_server, "_global_state", state)
    return TestClient(app)


def test_vllms_answers(vllm: TestClient) -> None:
    def load(**body: Any) -> Any:
        return vllm.post("/v1/load_lora_adapter", json=body)

    done = load(lora_name="new", lora_path="p")
    assert (done.status_code, done.text) == (
        200,
        "Success: LoRA adapter 'new' added successfully.",
    )
    taken = load(lora_name="new", lora_path="p")
    assert taken.status_code == 400
    assert "has already been loaded" in taken.json()["error"]["message"]
    assert load(lora_name="new", lora_path="p", load_inplace=True).status_code == 200
    broken = load(lora_name="x", lora_path="broken")
    assert (broken.status_code, broken.json()["error"]["message"]) == (400, "it is broken")
    for body in ({}, {"lora_name": "", "lora_path": "p"}, {"lora_name": "x", "lora_path": 3}):
        assert load(**body).status_code == 422  # 400 in SGLang's application
    for name in ("new", "new", "nobody"):
        gone = vllm.post("/v1/unload_lora_adapter", json={"lora_name": name, "lora_int_id": 1})
        assert (gone.status_code, gone.text) == (
            200,
            f"Success: LoRA adapter '{name}' removed successfully.",
        )
