"""A drain refuses, waits, aborts what is left, and ends the process with exit code 0."""

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI, WebSocket
from sglang.srt.managers.io_struct import ShutdownReq
from sglang.srt.managers.tokenizer_manager import ServerStatus
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from sglang_graft.serving import drain
from sglang_graft.serving.drain import ATTRIBUTE, Drain, Gate


class Manager:
    """The parts of SGLang's tokenizer manager that a drain uses."""

    def __init__(self) -> None:
        self.gracefully_exit = False
        self.server_status = ServerStatus.Up
        self.rid_to_state: dict[str, Any] = {}
        self.done: list[Any] = []
        self._subprocess_watchdog = SimpleNamespace(stop=lambda: self.done.append("watchdog"))

    def abort_request(self, *, abort_all: bool) -> None:
        assert abort_all
        self.done.append("abort")
        self.rid_to_state.clear()

    def _dispatch_to_scheduler(self, message: Any) -> None:
        self.done.append(type(message))


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    made = Manager()
    monkeypatch.setattr(drain, "collect_scheduler_processes", list)
    monkeypatch.setattr(os, "kill", lambda pid, sig: made.done.append((pid, sig)))
    monkeypatch.setattr(drain, "CLOSE_SECONDS", 1e6)
    return made


END = ["watchdog", ShutdownReq, (os.getpid(), signal.SIGINT)]


async def nothing(_: Any) -> None:
    raise AssertionError("SGLang's own watchdog was asked")


def test_nothing_happens_before_the_signal(manager: Manager) -> None:
    async def run() -> None:
        setattr(manager, ATTRIBUTE, Drain(manager, 10))
        task = asyncio.create_task(drain.watch(nothing, manager))
        await asyncio.sleep(0.12)
        assert not task.done()
        assert manager.done == []
        task.cancel()

    asyncio.run(run())


def test_an_idle_server_ends_at_once(manager: Manager) -> None:
    made = Drain(manager, 1000)
    setattr(manager, ATTRIBUTE, made)
    made.begin()
    manager.rid_to_state["HEALTH_CHECK_1"] = None
    asyncio.run(asyncio.wait_for(drain.watch(nothing, manager), 10))
    assert manager.done == END


def test_requests_under_way_are_waited_for(manager: Manager) -> None:
    async def run() -> None:
        made = Drain(manager, 1000)
        setattr(manager, ATTRIBUTE, made)
        made.requests, manager.rid_to_state["r"] = 1, None
        made.begin()
        assert made.refuses, "at once, where there is no notice"
        task = asyncio.create_task(drain.watch(nothing, manager))
        await asyncio.sleep(0.12)
        del manager.rid_to_state["r"]  # the last token is there, but has not been sent
        await asyncio.sleep(0.12)
        assert manager.done == []
        made.requests = 0
        await asyncio.wait_for(task, 10)

    asyncio.run(run())
    assert manager.done == END


def test_what_does_not_end_is_aborted(manager: Manager) -> None:
    made = Drain(manager, 0.1)
    setattr(manager, ATTRIBUTE, made)
    manager.rid_to_state["r"] = None
    made.begin()
    asyncio.run(asyncio.wait_for(drain.watch(nothing, manager), 10))
    assert manager.done == ["abort", *END]


def test_during_the_notice_requests_are_still_taken(manager: Manager) -> None:
    async def run() -> None:
        made = Drain(manager, 1000, 0.2)
        setattr(manager, ATTRIBUTE, made)
        made.begin()
        task = asyncio.create_task(drain.watch(nothing, manager))
        await asyncio.sleep(0.1)
        assert (made.has_begun, made.refuses) == (True, False)
        made.requests = 1
        await asyncio.sleep(0.2)
        assert made.refuses
        made.requests = 0
        await asyncio.wait_for(task, 10)

    asyncio.run(run())
    assert manager.done == END


def test_sglangs_own_first_request_is_never_refused(manager: Manager) -> None:
    made = Drain(manager, 1000)
    made._notice_is_over = True
    manager.server_status = ServerStatus.Starting
    assert not made.refuses
    manager.server_status = ServerStatus.Up
    assert made.refuses


def test_an_unhealthy_server_and_an_engine_are_left_to_sglang(manager: Manager) -> None:
    async def original(self: Any) -> None:
        self.done.append("original")

    asyncio.run(drain.watch(original, manager))
    assert manager.done == ["original"]
    made = Drain(manager, 1000)
    setattr(manager, ATTRIBUTE, made)
    manager.rid_to_state["r"] = None
    manager.server_status = ServerStatus.UnHealthy
    made.begin()
    asyncio.run(asyncio.wait_for(drain.watch(original, manager), 10))
    assert manager.done[:2] == ["original", "original"]


@pytest.fixture
def gated() -> tuple[TestClient, Drain]:
    manager = Manager()
    made = Drain(manager, 10)
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def answer(path: str) -> int:
        return made.requests

    @app.websocket("/v1/realtime")
    async def talk(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_json(made.requests)
        await socket.close()

    app.add_middleware(Gate, drain=made)
    return TestClient(app), made


def test_the_gate_counts_what_asks_for_answers(gated: tuple[TestClient, Drain]) -> None:
    client, made = gated
    for path in ("/generate", "/v1/chat/completions", "/v1/responses/r1"):
        assert client.post(path).json() == 1
    for path in ("/health", "/health_generate", "/metrics", "/graft/pool", "/unknown"):
        assert client.get(path).json() == 0
    with client.websocket_connect("/v1/realtime") as socket:
        assert socket.receive_json() == 1
    assert made.requests == 0


def test_the_gate_refuses_with_a_reason(gated: tuple[TestClient, Drain]) -> None:
    client, made = gated
    made._notice_is_over = True
    answer = client.post("/v1/chat/completions")
    assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert int(answer.headers["retry-after"]) > 0
    assert "shutting down" in answer.json()["error"]["message"]
    for path in ("/health", "/metrics", "/graft/pool", "/unload_lora_adapter"):
        assert client.post(path).status_code == httpx.codes.OK
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
        pass


def test_a_scheduler_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> str:
        raise psutil.NoSuchProcess(1)

    running, zombie = lambda: psutil.STATUS_RUNNING, lambda: psutil.STATUS_ZOMBIE
    found = [SimpleNamespace(status=status) for status in (running, zombie, gone)]
    monkeypatch.setattr(drain, "collect_scheduler_processes", lambda: found)
    assert drain._schedulers() == 1
    del found[0]
    assert drain._schedulers() == 0


def test_a_request_that_fails_is_no_longer_under_way() -> None:
    made = Drain(Manager(), 10)

    async def fail(*_: Any) -> None:
        assert made.requests == 1
        raise RuntimeError

    async def run() -> None:
        scope = {"type": "http", "path": "/generate", "method": "POST"}
        with pytest.raises(RuntimeError):
            await Gate(fail, made)(scope, None, None)

    asyncio.run(run())
    assert made.requests == 0
