"""A server that answers as SGLang's `/generate` does, in a thread; and a clock that tests move."""

from __future__ import annotations

import asyncio
import heapq
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from sglang_graft.bench.process import free_port

PAGE_BYTES = 1024
# 2 layers, hidden 8, one KV head of 4: small enough to count by hand.
CONFIG = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40_000,
}


def save_config(folder: Path) -> Path:
    """Make `folder` look like a model's, as far as its shape goes; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@dataclass
class FakeServer:
    """Answers with tokens that follow from the prompt. `failures`: how the next requests fail."""

    kv_tokens: int = 100_000
    pages: int = 1000
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    flushed: int = 0
    busy_flushes: int = 0
    probe: bool = True
    hangs: bool = True
    """As long as it is set, a failure called "hang" goes on."""

    def app(self) -> FastAPI:
        """Its routes."""
        app = FastAPI()

        @app.post("/generate")
        async def generate(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            return self._generate(body)

        @app.post("/flush_cache")
        async def flush_cache() -> Response:
            if self.busy_flushes:
                self.busy_flushes -= 1
                return Response(status_code=400)
            self.flushed += 1
            return Response("ok")

        @app.get("/server_info")
        async def server_info() -> dict[str, Any]:
            state = {"graft_stock_probe": self.stock_report()} if self.probe else {}
            return {"max_total_num_tokens": self.kv_tokens, "internal_states": [state]}

        @app.get("/graft/pool")
        async def pool() -> dict[str, Any]:
            return graft_report(self.pages, loads=len(self.bodies))

        return app

    def stock_report(self) -> dict[str, Any]:
        """The probe: a tenth of the KV cached, a quarter of that invalid."""
        total = self.kv_tokens
        return {
            "tokens_total": total,
            "tokens_free": total - total // 10 - 100,
            "tokens_cached": total // 10,
            "tokens_invalid": total // 40,
            "slots_total": 2,
            "slots_used": 2,
            "loads": {"adapter-0": len(self.bodies)},
            "evictions": max(len(self.bodies) - 2, 0),
            "seconds": 0.001,
        }

    def _generate(self, body: dict[str, Any]) -> Response:
        count = body["sampling_params"]["max_new_tokens"]
        start = sum(body["input_ids"]) % 1000
        tokens = [start + step for step in range(count)]
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "status":
            return JSONResponse({"error": "no"}, status_code=400)
        if body.get("stream"):
            return StreamingResponse(self._events(tokens, failure), media_type="text/event-stream")
        best = [[[-0.5, token, None], [-1.5, token + 1, None]] for token in tokens]
        meta = {"cached_tokens": 0, "output_top_logprobs": best}
        return JSONResponse({"output_ids": tokens, "meta_info": meta})

    async def _let_go(self) -> None:
        while self.hangs:
            await asyncio.sleep(0.01)

    async def _events(self, tokens: list[int], failure: str) -> AsyncIterator[bytes]:
        steps = [*range(1, len(tokens), 2), len(tokens)]
        for seen in steps:
            if failure == "short" and seen == len(tokens):
                break
            if failure == "hang" and seen == steps[2]:
                await self._let_go()
            if failure == "event" and seen == steps[1]:
                yield b'data: {"error": {"message": "broken", "code": 400}}\n\n'
                break
            meta = {"completion_tokens": seen, "cached_tokens": 3}
            event = {"output_ids": tokens[:seen], "meta_info": meta}
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
            await asyncio.sleep(0)
        yield b"data: [DONE]\n\n"


def graft_report(pages: int, loads: int = 0) -> dict[str, Any]:
    """A report of /graft/pool as far as samples read it."""
    return {
        "pages": {
            "total": pages,
            "free": pages - 30,
            "adapter": 5,
            "kv_cached": 20,
            "kv_running": 4,
            "in_flight": 1,
        },
        "page_bytes": PAGE_BYTES,
        "invalid_kv_pages": 0,
        "host": {
            "pages": {"total": 2 * pages},
            "loads": loads,
            "evictions": 0,
            "pages_to_device": 5 * loads,
            "pages_to_host": 2,
            "disk_reads": 0,
            "passes_waited": 1,
        },
    }


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """Run it until the block ends."""
    port = free_port()
    runner = uvicorn.Server(
        uvicorn.Config(server.app(), port=port, log_level="error", lifespan="off")
    )
    thread = threading.Thread(target=runner.run)
    thread.start()
    try:
        while not runner.started:
            assert thread.is_alive(), "the fake server did not start"
            threading.Event().wait(0.01)
        server.url = f"http://127.0.0.1:{port}"
        yield server
    finally:
        server.hangs = False  # or it would wait for the answer's end
        runner.should_exit = True
        thread.join()


class MovedClock:
    """Seconds that pass only when everybody sleeps."""

    def __init__(self) -> None:
        self._now = 100.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def now(self) -> float:
        return self._now

    async def sleep_until(self, when: float) -> None:
        if when <= self._now:
            return
        self._count += 1
        wake = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (when, self._count, wake))
        await wake

    async def drive(self, work: asyncio.Future[Any]) -> None:
        """Move time on to the next sleeper until `work` is done."""
        while not work.done():
            for _ in range(50):  # let everybody who can go on do so
                await asyncio.sleep(0)
            if work.done():
                return
            assert self._sleepers, "everybody waits, and nobody for a time"
            when, _, wake = heapq.heappop(self._sleepers)
            if not wake.done():
                self._now = max(self._now, when)
                wake.set_result(None)


def played(clock: MovedClock, work: Any) -> Any:
    """The result of a coroutine under a clock of ours."""

    async def both() -> Any:
        task = asyncio.ensure_future(work)
        await clock.drive(task)
        return task.result()

    return asyncio.run(both())
