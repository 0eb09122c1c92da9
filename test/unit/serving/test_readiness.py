"""Ready means: up, warm, not paused, not draining. Anything else is 503 with the reason."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from sglang.srt.managers.tokenizer_manager import ServerStatus
from starlette.testclient import TestClient

from sglang_graft import config
from sglang_graft.serving import production_routes, readiness
from sglang_graft.serving.drain import Drain
from sglang_graft.serving.readiness import Readiness, names


class Manager:
    """The parts of SGLang's tokenizer manager that readiness looks at."""

    def __init__(self, broken: dict[str, Exception] | None = None) -> None:
        self.server_status = ServerStatus.Starting
        self.is_pause = self.gracefully_exit = False
        self.is_generation = True
        self.rid_to_state: dict[str, Any] = {}
        self.asked: list[Any] = []
        self.broken = broken or {}
        self.loops = 0
        self.frozen: list[ServerStatus] = []

    async def freeze_gc(self) -> None:
        self.frozen.append(self.server_status)

    async def generate_request(self, obj: Any, request: Any) -> Any:
        assert request is None, "this would be a client"
        self.asked.append(obj)
        await asyncio.sleep(0)
        if obj.lora_path in self.broken:
            raise self.broken[obj.lora_path]
        yield {}

    def auto_create_handle_loop(self) -> None:
        self.loops += 1


def made(manager: Manager, *warm: str) -> Readiness:
    return Readiness(manager, Drain(manager, 10), warm)


def test_states_in_the_order_in_which_they_count() -> None:
    manager = Manager()
    ready = made(manager)
    assert (ready.look().ready, ready.look().state) == (False, "starting")
    manager.server_status = ServerStatus.Up
    assert (ready.look().ready, ready.look().state) == (True, "ready")
    ready.holds["sync"] = "aliases are being switched"
    assert ready.look().reason == "aliases are being switched"
    manager.is_pause = True
    assert ready.look().state == "paused"
    manager.server_status = ServerStatus.UnHealthy
    assert ready.look().state == "unhealthy"
    manager.gracefully_exit = True
    manager.rid_to_state["r"] = None
    assert ready.look().model_dump() == {
        "ready": False,
        "state": "draining",
        "reason": "1 requests are under way",
        "instance": ready.instance,
    }
    assert made(manager).instance != ready.instance


def test_ready_only_once_all_are_warm() -> None:
    async def run() -> None:
        manager = Manager()
        ready = made(manager, "a", "b")
        task = asyncio.create_task(ready.warm_up())
        await asyncio.sleep(0.15)
        assert manager.asked == [], "SGLang's own warm-up comes first"
        assert manager.frozen == [], "what it makes belongs to the start"
        manager.server_status = ServerStatus.Up
        assert ready.look().reason == "0 of 2 adapters are warm"
        await asyncio.wait_for(task, 10)
        assert ready.look().ready
        assert [obj.lora_path for obj in manager.asked] == ["a", "b"]
        assert manager.frozen == [ServerStatus.Up]
        assert manager.asked[0].sampling_params == {"max_new_tokens": 1, "temperature": 0.0}

    asyncio.run(run())


@pytest.mark.parametrize("error", [ValueError("wrong"), HTTPException(404, "No adapter")])
def test_one_that_cannot_answer_keeps_the_server_from_being_ready(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    manager = Manager({"a": error})
    manager.server_status = ServerStatus.Up
    ready = made(manager, "a", "b")
    asyncio.run(ready.warm_up())
    assert ready.look().state == "failed"
    assert ready.look().reason.startswith("1 of 2 adapters to warm cannot answer")
    assert "--graft-warm: a cannot answer: " in caplog.text
    assert len(manager.asked) == 2, "the others are warmed all the same"


def test_names_of_the_option() -> None:
    start = [SimpleNamespace(lora_name="a"), SimpleNamespace(lora_name="b")]
    assert names("", start) == []
    assert names("all", start) == ["a", "b"]
    assert names(" c , all,c,, ", start) == ["c", "a", "b"]


def test_the_routes_and_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.entrypoints import http_server

    manager = Manager()
    state = SimpleNamespace(tokenizer_manager=manager)
    monkeypatch.setattr(http_server, "_global_state", state)
    monkeypatch.setattr(readiness, "POLL_SECONDS", 0.01)
    app = FastAPI()
    options = config.GraftConfig(drain_seconds=7, warm="all")
    production_routes.add_to(app, manager, options, [SimpleNamespace(lora_name="a")])
    with TestClient(app) as client:
        assert manager.loops == 1, "SIGTERM is answered from the start on"
        starting = client.get("/health/ready")
        assert (starting.status_code, starting.json()["state"]) == (503, "starting")
        assert starting.headers["x-request-id"]
        manager.server_status = ServerStatus.Up
        for _ in range(200):
            if client.get("/health/ready").status_code == 200:
                break
        assert client.get("/health/ready").json()["ready"] is True
        assert [obj.lora_path for obj in manager.asked] == ["a"]
        drained = client.post("/graft/drain")
        assert drained.status_code == 202
        assert drained.json() == {"draining": True, "requests": 0, "seconds": 7.0}
        assert client.get("/health/ready").json()["state"] == "draining"
        assert manager.gracefully_exit
