"""The routes of single adapters, over a tokenizer manager without a server and a scripted pool."""

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI
from manager import PAGES, Manager
from starlette.testclient import TestClient

from sglang_graft.serving import adapter_admin, adapter_routes
from sglang_graft.serving.control import RefusedOperationError
from sglang_graft.serving.load import load
from sglang_graft.serving.unload import unload

LEFT = [{"adapters": ["old"], "bytes": 7, "kv_bytes": 0}]


class Pool(Manager):
    """Answers operations: rows for what is loaded, and the steps of a warm-up from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.steps: list[str] = ["done"]
        self.refuses: set[str] = set()

    async def ask(self, manager: Any, operation: str, **arguments: Any) -> dict[str, Any]:
        assert manager is self
        if operation != "adapters":
            self.asked.append((operation, arguments))
        if operation in self.refuses:
            raise RefusedOperationError("no room")
        if operation == "adapters":
            rows = {i: {"state": "host", "bytes": 5} for i in self.paths}
            return {"adapters": rows, "page_bytes": 1}
        if operation == "warm_adapter":
            step = self.steps.pop(0)
            missing = 9 if step == "no room" else 0
            left = LEFT if step == "coming" else []
            return {"step": step, "failures": 3, "missing_bytes": missing, "left": list(left)}
        if operation == "release_adapter":
            return {"freed_bytes": 5, "following_bytes": 0}
        return {"left": list(LEFT), "fits": True, "leaves": LEFT}

    async def load_lora_adapter(self, obj: Any, request: Any = None) -> Any:
        return await load(Manager.original_load, self, obj)

    async def unload_lora_adapter(self, obj: Any, request: Any = None) -> Any:
        return await unload(Manager.original_load, self, obj, request)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    made = Pool()
    monkeypatch.setattr(adapter_admin, "ask", made.ask)
    monkeypatch.setattr(adapter_admin, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(adapter_routes, "_manager", lambda: made)

    # Paths are looked at elsewhere (test_load_paths); the fake manager's are only words.
    async def checked(accepted: Any, manager: Any, obj: Any, request: Any) -> Any:
        return await accepted(obj)

    monkeypatch.setattr("sglang_graft.serving.load_paths.checked", checked)
    return made


def ask(pool: Pool, method: str, path: str, body: Any = None) -> Any:
    app = FastAPI()
    app.include_router(adapter_routes.router)
    with TestClient(app) as client:
        response = client.request(method, f"/graft{path}", json=body)
    return response.status_code, response.json()


def test_a_load_applies_its_settings(pool: Pool) -> None:
    body = {"name": "team/x", "path": "p", "priority": 3, "ttl_seconds": 60, "warm": "device"}
    pool.steps = ["coming", "coming", "done"]
    status, said = ask(pool, "POST", "/adapters", body)
    assert status == 200
    assert [operation for operation, _ in pool.asked] == ["prioritize_adapter"] + [
        "warm_adapter"
    ] * 3
    assert [a["failures"] for o, a in pool.asked if o == "warm_adapter"] == [None, 3, 3]
    assert (said["adapter"]["name"], said["adapter"]["ttl_seconds"]) == ("team/x", 60)
    assert said["left"] == LEFT * 2
    assert said["warm"] == {"to": "device", "done": True, "missing_bytes": 0, "reason": None}
    assert ask(pool, "GET", "/adapters/team/x")[1]["path"] == "p"
    status, said = ask(pool, "GET", "/adapters")
    assert [row["name"] for row in said["adapters"]] == ["legal", "team/x"]
    assert (said["available"], said["aliases"]) == ([], {})


def test_statuses_say_what_is_wrong(pool: Pool) -> None:
    for body, wanted in (
        ({"name": "legal", "path": "p"}, 409),
        ({"name": "new", "path": "broken"}, 400),
        ({"name": "new"}, 400),  # no root, so nothing without a path
        ({"name": "new", "path": "p", "ttl_seconds": -1}, 422),
        ({"name": "new", "path": "p", "unknown": 1}, 422),
    ):
        assert ask(pool, "POST", "/adapters", body)[0] == wanted, body
    for method, path in (("GET", "/adapters/x"), ("DELETE", "/adapters/x"), ("GET", "/why/x")):
        assert ask(pool, method, path)[0] == 404
    assert ask(pool, "PATCH", "/adapters/x", {"pinned": True})[0] == 404
    assert pool.asked == []


def test_a_change_says_only_what_was_given(pool: Pool) -> None:
    legal = pool.lora_ref_cache["legal"].lora_id
    asked = {"id": legal, "name": "legal"}
    assert ask(pool, "PATCH", "/adapters/legal", {"pinned": True})[1]["left"] == LEFT
    assert pool.asked == [("pin_adapter", {"pinned": True, **asked})]
    assert pool.lora_ref_cache["legal"].pinned is True
    assert pool.lora_registry.ref("legal") is pool.lora_ref_cache["legal"]
    pool.asked.clear()
    assert ask(pool, "PATCH", "/adapters/legal", {})[0] == 200
    assert pool.asked == []


def test_a_refused_pin_changes_nothing_else(pool: Pool) -> None:
    pool.refuses = {"pin_adapter"}
    body = {"pinned": True, "priority": 5, "ttl_seconds": 3}
    status, said = ask(pool, "PATCH", "/adapters/legal", body)
    assert (status, said["detail"]) == (409, "no room")
    assert [operation for operation, _ in pool.asked] == ["pin_adapter"]
    assert pool.lora_registry.time_to_live == {}
    assert not pool.lora_ref_cache["legal"].pinned


def test_a_warm_up_without_room_says_how_much_is_missing(pool: Pool) -> None:
    pool.steps = ["no room"]
    status, said = ask(pool, "PATCH", "/adapters/legal", {"warm": "device"})
    assert status == 200
    assert (said["warm"]["done"], said["warm"]["missing_bytes"]) == (False, 9)
    assert "promised" in said["warm"]["reason"]


def test_a_warm_up_is_not_waited_for_for_ever(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_admin, "WARM_SECONDS", -1.0)
    pool.steps = ["coming", "done"]
    said = ask(pool, "PATCH", "/adapters/legal", {"warm": "host"})[1]
    assert (said["warm"]["done"], pool.steps) == (False, ["done"])
    assert "it goes on" in said["warm"]["reason"]


def test_an_unload_says_what_is_freed_unless_an_alias_leads_there(pool: Pool) -> None:
    assert ask(pool, "PUT", "/aliases/line", {"adapter": "legal"})[0] == 200
    status, said = ask(pool, "DELETE", "/adapters/legal")
    assert (status, "'line' leads to 'legal'" in said["detail"]) == (409, True)
    assert ask(pool, "DELETE", "/adapters/legal?dry_run=true")[0] == 409
    assert ask(pool, "PATCH", "/aliases", {"line": None}) == (200, {})
    dry = ask(pool, "DELETE", "/adapters/legal?dry_run=true")[1]
    assert dry == {
        "name": "legal",
        "freed_bytes": 5,
        "following_bytes": 0,
        "requests": 0,
        "loaded_again_on_use": False,
    }
    assert ask(pool, "DELETE", "/adapters/legal")[1] == dry | {"freed_bytes": PAGES * 100}
    assert pool.forgotten == ["legal"]


def test_dry_runs_change_nothing(pool: Pool) -> None:
    before = dict(pool.lora_ref_cache)
    assert ask(pool, "GET", "/why/legal?pin=true")[1]["fits"]
    assert ask(pool, "PATCH", "/adapters/legal?dry_run=true", {"pinned": True})[1]["fits"]
    assert [(o, a["pin"]) for o, a in pool.asked] == [("foresee_adapter", True)] * 2
    assert pool.lora_ref_cache == before


def test_aliases_over_http(pool: Pool) -> None:
    assert ask(pool, "PUT", "/aliases/a/b", {"adapter": "legal"})[0] == 200
    assert ask(pool, "GET", "/aliases/a/b")[1] == {"alias": "a/b", "adapter": "legal"}
    assert ask(pool, "GET", "/adapters/legal")[1]["aliases"] == ["a/b"]
    status, said = ask(pool, "GET", "/adapters/a/b")
    assert (status, "alias of 'legal'" in said["detail"]) == (404, True)
    assert ask(pool, "PUT", "/aliases/legal", {"adapter": "legal"})[0] == 409
    assert ask(pool, "PATCH", "/aliases", {"x": "legal", "y": "nobody"})[0] == 409
    assert ask(pool, "GET", "/aliases")[1] == {"a/b": "legal"}
    assert ask(pool, "DELETE", "/aliases/a/b")[1] == {"alias": "a/b", "adapter": "legal"}
    assert ask(pool, "DELETE", "/aliases/a/b")[0] == 404


def test_an_adapter_that_the_scheduler_does_not_know_yet(pool: Pool) -> None:
    pool.paths.clear()
    with pytest.raises(adapter_admin.AdminError, match="being loaded or replaced"):
        asyncio.run(adapter_admin.one(pool, "legal"))
