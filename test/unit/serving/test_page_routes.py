"""The page's files are in the package, and are given without a key."""

import re
from functools import partial
from typing import Any

import pytest
from fastapi import FastAPI
from sglang.srt.utils import auth
from starlette.testclient import TestClient

from sglang_graft.serving import page_routes
from sglang_graft.serving.page_routes import FILES, OPEN, decide
from sglang_graft.serving.route_table import level


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """Behind SGLang's own middleware, with both keys set."""
    monkeypatch.setattr(auth, "decide_request_auth", partial(decide, auth.decide_request_auth))
    own = auth._get_auth_level_from_app_and_scope
    monkeypatch.setattr(auth, "_get_auth_level_from_app_and_scope", partial(level, own))
    app = FastAPI()
    app.include_router(page_routes.router)

    @app.get("/graft/overview")
    async def overview() -> dict[str, Any]:
        return {}

    auth.add_api_key_middleware(app, api_key="api", admin_api_key="admin")
    return TestClient(app)


pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")


@pytest.mark.parametrize("path", sorted(OPEN))
def test_files_need_no_key(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    kind = FILES[{"graft": "index.html"}.get(name := path.rpartition("/")[2], name)]
    assert response.headers["content-type"] == kind
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'self'")
    assert "unsafe" not in policy


def test_what_they_show_does(client: TestClient) -> None:
    assert client.get("/graft/overview").status_code == 401
    assert client.get("/graft/page/other.js").status_code == 401
    assert client.post("/graft").status_code == 401
    admin = {"Authorization": "Bearer admin"}
    assert client.get("/graft/overview", headers=admin).status_code == 200
    api = {"Authorization": "Bearer api"}
    assert client.get("/graft/page/other.js", headers=api).status_code == 404
    assert client.get("/graft/page/..%2fpage_routes.py", headers=api).status_code in (401, 404)


def test_every_file_is_listed_and_nothing_outside_is_named(client: TestClient) -> None:
    texts = {path: client.get(path).text for path in OPEN}
    html = texts["/graft"]
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', html))
    assert named <= OPEN
    for path, text in texts.items():
        for module in re.findall(r'from "\./([^"]+)"', text):
            assert f"/graft/page/{module}" in OPEN, path
        outside = re.findall(r"https?://[^\s\"']+", text)
        assert set(outside) <= {"http://www.w3.org/2000/svg"}, path
    folder = page_routes.resources.files("sglang_graft.serving") / "page"
    assert {file.name for file in folder.iterdir()} == set(FILES)
