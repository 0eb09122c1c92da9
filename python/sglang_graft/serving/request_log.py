"""One JSON line for each request that has ended (`--graft-request-log`). No prompts, no keys.

Targets (0.5.17): BEFORE `TokenizerManager._handle_batch_output`, `_handle_abort_req` and
`_discard_pending_req_states`. Reasons: SGLang's own request log has no identity of the adapter,
leaves the adapter out where it leaves the prompt out, and misses requests that fail or whose client
leaves. A request's state goes in exactly these three places, each of which looks it up first: so
every request has one line. What `client_routes` refuses by the adapter's name never had a state.
"""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sglang_graft.engine.hooks import Hook
from sglang_graft.serving import request_id
from sglang_graft.serving.control import ask
from sglang_graft.serving.request_id import ATTRIBUTE

STDERR = "stderr"
ERROR_LENGTH = 300
LOG_ATTRIBUTE = "_graft_request_log"
"""Of a tokenizer manager: its RequestLog, where one is wanted."""

Tokens = tuple[int | None, int | None, int]
"""Of the prompt, of it from the cache, and of the answer; None: not known."""


def check_target(target: str) -> None:
    """Raise ValueError when no log can be written to `target`."""
    path = Path(target)
    if target and target != STDERR and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(
            f"--graft-request-log: wanted {STDERR!r} or a file in a folder that is there,"
            f" got {target!r}"
        )


class RequestLog:
    """Writes the lines. `identities` asks the scheduler for the identity of every adapter id."""

    def __init__(self, target: str, identities: Callable[[], Any]) -> None:
        # A file that log rotation has moved away is opened anew.
        self._handler = (
            logging.StreamHandler(sys.stderr) if target == STDERR else WatchedFileHandler(target)
        )
        self._ask = identities
        self._identities: dict[str, str] = {}
        self._pending: list[tuple[dict[str, Any], str]] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, line: dict[str, Any], adapter_id: str | None) -> None:
        """Write a line, now or once the identity of its adapter is known."""
        if adapter_id is None or adapter_id in self._identities:
            self._write(line | {"identity": self._identities.get(adapter_id or "")})
            return
        self._pending.append((line, adapter_id))
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._resolve())

    async def flush(self) -> None:
        """Until every line that was added before is written."""
        if self._task is not None:
            await self._task

    def close(self) -> None:
        """Close the file."""
        self._handler.close()

    async def _resolve(self) -> None:
        while self._pending:
            # Those that come while we ask wait for the next answer.
            lines, self._pending = self._pending, []
            self._identities = await self._ask()
            for line, adapter_id in lines:
                self._write(line | {"identity": self._identities.get(adapter_id)})

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False)
        self._handler.handle(
            logging.LogRecord("graft.requests", logging.INFO, "", 0, text, None, None)
        )


def start(manager: Any, target: str) -> None:
    """Log the requests of `manager`. Raises ValueError when the file cannot be written."""
    try:
        setattr(manager, LOG_ATTRIBUTE, RequestLog(target, lambda: ask(manager, "identities")))
    except OSError as error:
        raise ValueError(f"--graft-request-log: {target}: {error.strerror}") from None


async def flush(manager: Any) -> None:
    """Until the lines of all requests that have ended are written."""
    log: RequestLog | None = getattr(manager, LOG_ATTRIBUTE, None)
    if log is not None:
        await log.flush()


def turned_away(manager: Any, adapter: str | None, status: int, reason: str) -> None:
    """The line of a request that is answered with an error before the manager has heard of it."""
    log: RequestLog | None = getattr(manager, LOG_ATTRIBUTE, None)
    if log is None:
        return
    line = {
        "time": _now(),
        "event": "request",
        "id": None,
        "request_id": request_id.current(),
        "parent": None,
        "adapter": adapter,
        "identity": None,
        "stream": None,
        "prompt_tokens": None,
        "cached_tokens": None,
        "completion_tokens": 0,
        "ttft_s": None,
        "total_s": None,
        "finish": "error",
    }
    log.add(_with_error(line, reason, status), None)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _line(manager: Any, rid: str, state: Any, *, finish: str, tokens: Tokens) -> dict[str, Any]:
    times, now = state.time_stats, time.perf_counter()
    prompt, cached, completion = tokens
    stream = bool(getattr(state.obj, "stream", False))
    # Without a stream, tokens come here in lots, and the first lot is late.
    first = (times.first_token_time or now) if stream and completion else None
    return {
        "time": _now(),
        "event": "request",
        "id": rid,
        "request_id": getattr(state, ATTRIBUTE, None),
        "parent": manager.child_rid_to_logical_rid.get(rid),
        "adapter": state.obj.lora_path,
        "identity": None,
        "stream": stream,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": completion,
        "ttft_s": None if first is None else round(first - times.created_time, 6),
        "total_s": round(now - times.created_time, 6),
        "finish": finish,
        "status": 200,
        "error": None,
    }


def _add(manager: Any, state: Any, line: dict[str, Any]) -> None:
    adapter_id = getattr(state.obj, "lora_id", None)
    log: RequestLog = getattr(manager, LOG_ATTRIBUTE)
    log.add(line, adapter_id if isinstance(adapter_id, str) else None)


def _wanted(manager: Any, rid: str, state: Any) -> bool:
    """Whether there is a log, and this is a request that somebody waits for."""
    is_check = rid.startswith(HEALTH_CHECK_RID_PREFIX)
    return state is not None and hasattr(manager, LOG_ATTRIBUTE) and not is_check


def _with_error(line: dict[str, Any], text: str, status: int) -> dict[str, Any]:
    short = " ".join(text.split())[:ERROR_LENGTH]
    return line | {"status": status, "error": short}


def finished(self: Any, recv_obj: Any) -> None:
    """BEFORE `_handle_batch_output`: requests whose last tokens this is."""
    for i, rid in enumerate(recv_obj.rids):
        reason = recv_obj.finished_reasons[i]
        state = self.rid_to_state.get(rid)
        if reason is None or not _wanted(self, rid, state):
            continue
        made = getattr(recv_obj, "completion_tokens", None)
        tokens = (recv_obj.prompt_tokens[i], recv_obj.cached_tokens[i], made[i] if made else 0)
        line = _line(self, rid, state, finish=reason["type"], tokens=tokens)
        if reason["type"] == "abort":
            line = _with_error(line, reason.get("message") or "", reason.get("status_code") or 499)
        _add(self, state, line)


def aborted(self: Any, recv_obj: Any) -> None:
    """BEFORE `_handle_abort_req`: a request that the scheduler gave up while it waited."""
    state = self.rid_to_state.get(recv_obj.rid)
    if not _wanted(self, recv_obj.rid, state):
        return
    reason = recv_obj.finished_reason or {}
    text = reason.get("message") or recv_obj.abort_message or "Abort in waiting queue"
    line = _line(
        self, recv_obj.rid, state, finish="abort", tokens=(None, None, len(state.output_ids))
    )
    _add(self, state, _with_error(line, text, reason.get("status_code") or 499))


def discarded(self: Any, obj: Any, lifecycle_ids: dict[str, object] | None = None) -> None:
    """BEFORE `_discard_pending_req_states`: an error, or a client that has left."""
    error = sys.exc_info()[1]
    for logical in self._logical_rids(obj):
        for rid in (logical, *self.logical_rid_to_child_rids.get(logical, ())):
            state = self.rid_to_state.get(rid)
            if not _wanted(self, rid, state):
                continue
            if lifecycle_ids and state.lifecycle_id is not lifecycle_ids.get(logical):
                continue
            line = _line(
                self, rid, state, finish="error", tokens=(None, None, len(state.output_ids))
            )
            _add(self, state, _with_error(line, *_what(error)))


def _what(error: BaseException | None) -> tuple[str, int]:
    """Text and HTTP status of an exception; 499 is a client that did not wait."""
    if isinstance(error, HTTPException):
        return str(error.detail), error.status_code
    if isinstance(error, asyncio.CancelledError | GeneratorExit) or "disconnected" in str(error):
        return "the client has left", 499
    if isinstance(error, ValueError):
        return str(error), getattr(error, "status_code", 400)
    return type(error).__name__, 500


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_REASON = "one line for each request that has ended"

HOOKS = (
    Hook(
        target=f"{_MANAGER}._handle_batch_output",
        kind="before",
        function=finished,
        parameters=("self", "recv_obj"),
        reason=_REASON,
    ),
    Hook(
        target=f"{_MANAGER}._handle_abort_req",
        kind="before",
        function=aborted,
        parameters=("self", "recv_obj"),
        reason=_REASON,
    ),
    Hook(
        target=f"{_MANAGER}._discard_pending_req_states",
        kind="before",
        function=discarded,
        parameters=("self", "obj", "lifecycle_ids"),
        reason=_REASON,
    ),
)
