"""Ending a server without losing a request: SIGTERM, or POST /graft/drain.

Target (0.5.17): AROUND `TokenizerManager.sigterm_watchdog`; and the FastAPI application. Reasons:
after SIGTERM, SGLang goes on taking requests, looks only every five seconds whether any is left,
without a bound, and then kills itself: the exit code is that of SIGKILL, which supervisors take for
a crash.

Here `gracefully_exit`, the flag that SIGTERM sets, begins a drain. New requests are still taken
for `--graft-drain-notice-seconds`, so that balancers can see that the server is not ready; then
they get 503. What has not ended `--graft-drain-seconds` after the beginning is aborted. Then the
scheduler is told to end, and the HTTP server ends as after Ctrl-C: exit code 0.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import ShutdownReq
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.utils import get_bool_env_var, kill_process_tree
from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes
from starlette.responses import JSONResponse

from sglang_graft.engine.hooks import Hook
from sglang_graft.serving import request_log
from sglang_graft.serving.route_table import TABLE, Does, what_it_does

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
ABORT_SECONDS = 5.0
"""How long aborted requests may take to tell their clients."""
SCHEDULER_SECONDS = 15.0
CLOSE_SECONDS = 5.0
"""How long connections may take to close."""
RETRY_SECONDS = 5
"""What refused clients are told to wait: another replica is there at once, a new one is not."""
ATTRIBUTE = "_graft_drain"
_TRY_AGAIN_LATER = 1013  # of websockets


class Drain:
    """One server's way to its end."""

    def __init__(self, manager: Any, seconds: float, notice_seconds: float = 0.0) -> None:
        self.manager, self.seconds, self.notice_seconds = manager, seconds, notice_seconds
        self.requests = 0
        """HTTP requests that ask for answers and whose answer has not been sent."""
        self._notice_is_over = False

    def begin(self) -> None:
        """What SIGTERM does."""
        self.manager.gracefully_exit = True

    @property
    def has_begun(self) -> bool:
        """Whether the server is on its way to its end."""
        return bool(self.manager.gracefully_exit)

    @property
    def refuses(self) -> bool:
        """Whether new requests get 503. SGLang's own first request never does: it would end the
        server with an error."""
        over = self._notice_is_over or (self.has_begun and not self.notice_seconds)
        return over and self.manager.server_status != ServerStatus.Starting

    def under_way(self) -> int:
        """Requests that have not ended, also those without a connection."""
        states = sum(not i.startswith(HEALTH_CHECK_RID_PREFIX) for i in self.manager.rid_to_state)
        return max(self.requests, states)

    async def wait(self) -> None:
        """From the beginning until nothing is under way, or what was has been aborted."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        logger.info(
            "Draining: %d requests under way; new ones get 503 in %g s, all are aborted in %g s",
            self.under_way(),
            self.notice_seconds,
            self.seconds,
        )
        await asyncio.sleep(self.notice_seconds)
        self._notice_is_over = True
        await self._until(lambda: not self.under_way(), begun + self.seconds)
        if self.under_way() and not self._is_dead():
            logger.warning(
                "Draining: %d requests are aborted; raise --graft-drain-seconds", self.under_way()
            )
            self.manager.abort_request(abort_all=True)
            await self._until(lambda: not self.under_way(), clock() + ABORT_SECONDS)

    async def end(self) -> None:
        """End the scheduler, then this process."""
        await request_log.flush(self.manager)
        if self.manager._subprocess_watchdog is not None:
            self.manager._subprocess_watchdog.stop()  # it would take what follows for a crash
        self.manager._dispatch_to_scheduler(ShutdownReq())
        loop = asyncio.get_running_loop()
        await self._until(lambda: not _schedulers(), loop.time() + SCHEDULER_SECONDS)
        logger.info("Drained: the server ends")
        loop.call_later(CLOSE_SECONDS, _end_now)
        os.kill(os.getpid(), signal.SIGINT)

    def _is_dead(self) -> bool:
        """Whether nothing will end any more."""
        return bool(self.manager.server_status == ServerStatus.UnHealthy)

    async def _until(self, condition: Callable[[], bool], deadline: float) -> None:
        clock = asyncio.get_running_loop().time
        while not condition() and clock() < deadline:
            if self._is_dead():
                return
            await asyncio.sleep(POLL_SECONDS)


def _schedulers() -> int:
    """Scheduler processes that run; one that has ended stays in the list until we end."""
    running = 0
    for process in collect_scheduler_processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            running += process.status() != psutil.STATUS_ZOMBIE
    return running


def _end_now() -> None:
    logger.warning("Drained: connections are still open; the server ends all the same")
    kill_process_tree(os.getpid(), include_parent=False)
    os._exit(0)


class Gate:
    """ASGI middleware: counts requests until their answers are sent, and refuses new ones."""

    def __init__(self, app: Any, drain: Drain) -> None:
        self.app, self.drain = app, drain

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Everything that tells about the server, or controls it, passes."""
        if not _asks_for_an_answer(scope):
            await self.app(scope, receive, send)
        elif self.drain.refuses:
            await _refuse(scope, receive, send)
        else:
            self.drain.requests += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self.drain.requests -= 1


def _asks_for_an_answer(scope: Any) -> bool:
    if scope["type"] == "websocket":
        return True
    if scope["type"] != "http" or scope["path"].startswith("/health"):
        return False
    does = TABLE.get(scope["path"]) or what_it_does(scope)
    return does is Does.SERVES


async def _refuse(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER})
        return
    message = "The server is shutting down and takes no new requests; ask another one, or later."
    error = {"message": message, "type": "service_unavailable_error", "code": 503}
    answer = JSONResponse(
        {"error": error}, status_code=503, headers={"Retry-After": str(RETRY_SECONDS)}
    )
    await answer(scope, receive, send)


def of(manager: Any) -> Drain | None:
    """The drain of a server; None in a program that uses Engine."""
    found: Drain | None = getattr(manager, ATTRIBUTE, None)
    return found


async def watch(original: Callable[..., Awaitable[None]], self: Any) -> None:
    """AROUND `sigterm_watchdog`, which runs from the first request on."""
    drain = of(self)
    if drain is None or get_bool_env_var("SGL_FORCE_SHUTDOWN"):
        await original(self)
        return
    while not drain.has_begun:
        await asyncio.sleep(POLL_SECONDS)
    await drain.wait()
    if self.server_status == ServerStatus.UnHealthy:
        await original(self)  # SGLang keeps what it knows about a crash
    await drain.end()


HOOKS = (
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.sigterm_watchdog",
        kind="around",
        function=watch,
        parameters=("self",),
        reason="a drain refuses new requests, is bounded, and ends with exit code 0",
    ),
)
