"""What POST /flush_cache does while something runs: it waits for what ends anyway, or says why not.

Target (0.5.17): AROUND `SchedulerFlushWrapper.handle`. Reason: SGLang refuses a flush until its
loop has put the last batch away, which is a turn after the last answer was sent. So the same calls
in the same order are answered with success or with "Flush cache failed.", as it happens.

- A request that is running or waits: refused, with the counts; `?timeout=SECONDS` waits for it.
- Requests that have ended or were aborted, and health checks (one token): the flush waits for them.
- Loads and reads that nobody waits for: no reason to wait. Copies under way are void and their
  pages fenced (`tiers/transfers`); what is read from disk goes to the host pool.
"""

from collections.abc import Callable, Iterable
from typing import Any

from sglang.srt.managers.io_struct import FlushCacheReqOutput
from sglang.srt.managers.utils import is_health_check_generate_req

from sglang_graft.engine.hooks import Hook

# More than the last forward of a request takes that needs no other one.
ENDING_SECONDS = 60.0


def _count(scheduler: Any, requests: Iterable[Any]) -> int:
    """How many of these go on: not ended, not aborted, not a health check."""
    gone = scheduler._pending_chunked_abort_req
    found = {id(req): req for req in requests if req is not gone}
    return sum(
        not (req.finished() or req.to_finish or is_health_check_generate_req(req))
        for req in found.values()
    )


def unfinished(scheduler: Any) -> tuple[int, int]:
    """(running, waiting) requests that a flush would have to wait for."""
    last, chunked = scheduler.last_batch, scheduler.chunked_req
    running = [*scheduler.running_batch.reqs, *(last.reqs if last is not None else ())]
    running += [] if chunked is None else [chunked]
    waiting = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    return _count(scheduler, running), _count(scheduler, waiting)


def handle(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """AROUND `SchedulerFlushWrapper.handle`."""
    scheduler = self._is_fully_idle.__self__  # it is given methods of its scheduler, and no more
    if recv_req.timeout_s or scheduler._engine_paused or scheduler.is_fully_idle():
        return original(self, recv_req)
    running, waiting = unfinished(scheduler)
    if running or waiting:
        return FlushCacheReqOutput(
            success=False,
            message=f"Cache not flushed: {running} requests are running and {waiting} are waiting."
            " Try again when they have ended, or POST /flush_cache?timeout=SECONDS to wait.\n",
        )
    recv_req.timeout_s = ENDING_SECONDS
    return original(self, recv_req)


HOOKS = (
    Hook(
        target="sglang.srt.managers.scheduler_components.flush_wrapper"
        ".SchedulerFlushWrapper.handle",
        kind="around",
        function=handle,
        parameters=("self", "recv_req"),
        reason="a flush is answered by what runs, not by the moment at which it comes",
    ),
)
