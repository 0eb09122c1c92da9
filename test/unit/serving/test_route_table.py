"""Every route of the real application is classified, and asks for the key that its class needs."""

import asyncio
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sglang.srt.utils import auth
from starlette.testclient import TestClient

from sglang_graft.serving import listing, route_table, routes, tenant_routes
from sglang_graft.serving.route_table import TABLE, Does, level, what_it_does

ADMIN, API = {"Authorization": "Bearer admin"}, {"Authorization": "Bearer api"}
CHANGES = sorted(path for path, does in TABLE.items() if does is Does.CHANGES)
OPERATES = sorted(path for path, does in TABLE.items() if does is Does.OPERATES)
OPEN = sorted(path for path, does in TABLE.items() if does in (Does.READS, Does.SERVES))


def paths(routes: list[Any]) -> Iterator[str]:
    """Paths of routes, and of routes in the routers that were included."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is None:
            yield route.path
        else:
            yield from paths(included.routes)


@pytest.fixture(scope="module")
def real_paths() -> set[str]:
    """What SGLang's application serves, with our routes in it."""
    from sglang.srt.entrypoints import http_server

    ours = FastAPI(openapi_url=None)
    ours.include_router(routes.router)
    ours.include_router(tenant_routes.router)
    listing.add_to(ours)
    return {*paths(http_server.app.router.routes), *paths(ours.router.routes)}


def test_every_route_of_the_real_application_is_classified(real_paths: set[str]) -> None:
    assert len(real_paths) > 70
    assert real_paths - TABLE.keys() == set(), "say in serving/route_table.py what they do"


def test_no_row_is_about_a_route_that_is_not_there(real_paths: set[str]) -> None:
    assert TABLE.keys() - real_paths == {"/metrics"}  # mounted with --enable-metrics


def test_sglangs_own_admin_routes_are_among_ours() -> None:
    from sglang.srt.entrypoints import http_server

    for route in http_server.app.router.routes:
        if getattr(getattr(route, "endpoint", None), "_auth_level", None) is not None:
            assert TABLE[route.path] in (Does.CHANGES, Does.OPERATES), route.path


def test_what_is_always_open_changes_nothing() -> None:
    assert not [path for path in CHANGES + OPERATES if path.startswith(("/health", "/metrics"))]


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How an application that has every path answers behind SGLang's own middleware."""
    original = auth._get_auth_level_from_app_and_scope
    monkeypatch.setattr(auth, "_get_auth_level_from_app_and_scope", partial(level, original))

    async def ask(app: FastAPI, method: str, path: str, headers: dict[str, str]) -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            answer = await client.request(method, f"http://server{path}", headers=headers)
            return answer.status_code

    def run(keys: dict[str, str], method: str, path: str, headers: dict[str, str]) -> int:
        app = FastAPI(openapi_url=None)

        @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
        async def answer(path: str) -> str:
            return path

        auth.add_api_key_middleware(app, **({"api_key": None, "admin_api_key": None} | keys))
        return asyncio.run(ask(app, method, path, headers))

    return run


BOTH = {"api_key": "api", "admin_api_key": "admin"}
KEYS: list[tuple[dict[str, str], dict[str, str], int]] = [
    ({"admin_api_key": "admin"}, {}, 401),
    ({"admin_api_key": "admin"}, API, 401),
    ({"admin_api_key": "admin"}, ADMIN, 200),
    (BOTH, API, 401),
    (BOTH, ADMIN, 200),
    ({"api_key": "api"}, {}, 401),
    ({"api_key": "api"}, API, 200),
    ({}, {}, 200),
]


@pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")
@pytest.mark.parametrize("path", [*CHANGES, *OPERATES, "/unknown", "/generate/more"])
def test_the_admin_key_is_asked_for(status: Any, path: str) -> None:
    for keys, headers, wanted in KEYS:
        assert status(keys, "POST", path, headers) == wanted
    for method in ("GET", "PUT", "DELETE"):
        assert status(BOTH, method, path, API) == 401


@pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")
@pytest.mark.parametrize("path", OPEN)
def test_other_routes_are_open_as_before(status: Any, path: str) -> None:
    path = path.replace("{model:path}", "team/legal").replace("{response_id}", "r")
    assert status({"admin_api_key": "admin"}, "POST", path, {}) == 200
    always = path.startswith(("/health", "/metrics"))
    assert status({"api_key": "api"}, "POST", path, {}) == (200 if always else 401)


def test_a_level_is_never_lowered() -> None:
    scope = {"type": "http", "path": "/generate", "method": "POST", "headers": []}
    for own in auth.AuthLevel:
        assert level(lambda *_, own=own: own, None, scope) == own
    assert what_it_does(scope | {"path": "/v1/models/a/b"}) is Does.READS
    assert what_it_does(scope | {"path": "/v1/models/../load_lora_adapter"}) is Does.READS


def test_listing_comes_before_the_routes_of_the_same_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = FastAPI()

    @app.get("/v1/models")
    async def available() -> str:
        raise AssertionError("ours comes first")

    @app.get("/v1/models/{model:path}")
    async def retrieve(model: str) -> str:
        raise AssertionError("ours comes first")

    listing.add_to(app)
    manager = SimpleNamespace(served_model_name="base", lora_ref_cache={})
    manager.lora_ref_cache["x:y"] = SimpleNamespace(lora_path="folder")
    monkeypatch.setattr(
        listing.http_server, "_global_state", SimpleNamespace(tokenizer_manager=manager)
    )

    async def loaded() -> Any:
        return SimpleNamespace(data=["base", "x:y"])

    monkeypatch.setattr(listing.http_server, "available_models", loaded)
    with TestClient(app) as asked:
        assert asked.get("/v1/models").json() == {"data": ["base", "x:y"]}
        card = asked.get("/v1/models/x:y").json()
        assert (card["id"], card["root"], card["parent"]) == ("x:y", "folder", "base")
        missing = asked.get("/v1/models/nobody")
        assert missing.status_code == 404
    assert route_table.TABLE["/v1/models"] is Does.READS
