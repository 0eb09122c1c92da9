"""Whether balancers should send requests here: GET /health/ready, and the warm-up behind it.

Seam (0.5.17): the lifespan of the FastAPI application. Reasons: SGLang's `/health` says that the
server lives, whatever it has loaded; nothing of SGLang's runs between its own warm-up request and
the first client's. Paths below /health are open without a key, as probes carry none.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import HTTPException
from pydantic import BaseModel
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus

from sglang_graft.serving.drain import Drain

logger = logging.getLogger(__name__)

ALL = "all"
POLL_SECONDS = 0.1


class Ready(BaseModel):
    """The answer of /health/ready. `state` is one word, `reason` a sentence.

    instance: chosen at random when the process starts, so another one tells of a restart.
    """

    ready: bool
    state: str
    reason: str
    instance: str


class Readiness:
    """What keeps one server from being ready. `holds` are reasons of others, by topic."""

    def __init__(self, manager: Any, drain: Drain, warm: Sequence[str] = ()) -> None:
        self.manager, self.drain, self.warm = manager, drain, tuple(warm)
        self.holds: dict[str, str] = {}
        self.instance = uuid.uuid4().hex
        self._failed: list[str] = []
        if warm:
            self._hold_warm_up(0)

    def look(self) -> Ready:
        """The first reason not to be ready, if there is one."""
        state, reason = self._state()
        return Ready(ready=state == "ready", state=state, reason=reason, instance=self.instance)

    def _state(self) -> tuple[str, str]:
        status = self.manager.server_status
        if self.drain.has_begun:
            return "draining", f"{self.drain.under_way()} requests are under way"
        if status == ServerStatus.Starting:
            return "starting", "SGLang's own first request has not ended"
        if status == ServerStatus.UnHealthy:
            return "unhealthy", "SGLang's last health check failed"
        if self.manager.is_pause:
            return "paused", "generation is paused; POST /continue_generation ends that"
        for topic, reason in self.holds.items():
            return topic, reason
        return "ready", "requests are welcome"

    async def warm_up(self) -> None:
        """Let each adapter of `warm` answer one request, once SGLang is up.

        One that cannot keeps the server from ever being ready. Before that, Python's garbage
        collector is told to leave alone what the start has made, in all processes: 800,000 objects
        and more, a walk over which takes about 0.5 s, and no request goes on meanwhile.
        """
        while self.manager.server_status == ServerStatus.Starting:
            await asyncio.sleep(POLL_SECONDS)
        await self.manager.freeze_gc()
        for done, name in enumerate(self.warm, 1):
            try:
                await self._ask(name)
            except (ValueError, HTTPException) as error:
                detail = getattr(error, "detail", error)
                logger.error("--graft-warm: %s cannot answer: %s", name, detail)
                self._failed.append(name)
            self._hold_warm_up(done)

    def _hold_warm_up(self, done: int) -> None:
        self.holds.pop("warming", None)
        if self._failed:
            # No names: anybody may ask.
            self.holds["failed"] = (
                f"{len(self._failed)} of {len(self.warm)} adapters to warm cannot answer;"
                " the server's log says why"
            )
        elif done < len(self.warm):
            self.holds["warming"] = f"{done} of {len(self.warm)} adapters are warm"

    async def _ask(self, name: str) -> None:
        kind = GenerateReqInput if self.manager.is_generation else EmbeddingReqInput
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        request = kind(
            rid=f"graft-warm-{uuid.uuid4().hex}",
            input_ids=[0],
            sampling_params=sampling,
            lora_path=name,
            log_metrics=False,
        )
        async for _ in self.manager.generate_request(request, None):
            pass


def names(option: str, lora_paths: Sequence[Any]) -> list[str]:
    """The adapters of --graft-warm, in order; `all` stands for those of --lora-paths."""
    found: dict[str, None] = {}
    for part in (part.strip() for part in option.split(",")):
        several = [ref.lora_name for ref in lora_paths] if part == ALL else [part]
        found |= dict.fromkeys(name for name in several if name)
    return list(found)


def run_with(app: Any, readiness: Readiness) -> None:
    """Warm up when `app` starts. SIGTERM is answered from then on, not from the first request."""
    original = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(started: Any) -> AsyncIterator[Any]:
        async with original(started) as state:
            readiness.manager.auto_create_handle_loop()
            task = asyncio.create_task(readiness.warm_up())
            try:
                yield state
            finally:
                task.cancel()

    app.router.lifespan_context = lifespan
