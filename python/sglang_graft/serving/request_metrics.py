"""Requests, errors and first tokens by adapter, counted once a request in the HTTP process.

Targets (0.5.17), all of `TokenizerManager`:
- `_remove_req_state`: every request leaves `rid_to_state` there exactly once, whatever its end;
- `_handle_abort_finish_reason`: sees how each request ended that somebody still listens to;
- `_discard_pending_req_states`: is called for the exception that ends a request early.

A request with n > 1 is one request, with a first token for each of its samples. SGLang's own health
checks are not counted.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from sglang_graft import config
from sglang_graft.engine.hooks import Hook
from sglang_graft.serving.adapter_labels import BASE, UNKNOWN, AdapterLabels
from sglang_graft.tiers import SECONDS, Histogram

_REASONS = {
    int(HTTPStatus.BAD_REQUEST): "bad_request",
    int(HTTPStatus.NOT_FOUND): "not_found",
    int(HTTPStatus.TOO_MANY_REQUESTS): "too_many_requests",
    int(HTTPStatus.SERVICE_UNAVAILABLE): "unavailable",
}
_LEFT = (asyncio.CancelledError, GeneratorExit)


@dataclass(slots=True)
class RequestCounts:
    """Counts since start by adapter label."""

    most: int
    requests: dict[str, int] = field(default_factory=dict)
    errors: dict[tuple[str, str], int] = field(default_factory=dict)
    ttft: dict[str, Histogram] = field(default_factory=dict)
    labels: AdapterLabels = field(init=False)

    def __post_init__(self) -> None:
        self.labels = AdapterLabels(self.most, self._drop)

    def ended(self, name: str | None) -> None:
        """A request for an adapter that exists (None: the base model) has ended."""
        label = BASE if name is None else self.labels.count(name)
        self.requests[label] = self.requests.get(label, 0) + 1

    def ended_unknown(self) -> None:
        """A request that named no adapter that exists has ended."""
        self.requests[UNKNOWN] = self.requests.get(UNKNOWN, 0) + 1

    def turned_away(self) -> None:
        """A request named no adapter that exists, and was answered before it became one."""
        self.ended_unknown()
        self.failed(UNKNOWN, "not_found")

    def failed(self, label: str, reason: str) -> None:
        """A request ended without its answer."""
        self.errors[label, reason] = self.errors.get((label, reason), 0) + 1

    def answered(self, label: str, seconds: float) -> None:
        """A request had its first token after `seconds`, and was answered."""
        if label not in self.ttft:
            self.ttft[label] = Histogram(SECONDS)
        self.ttft[label].observe(seconds)

    def report(self) -> dict[str, Any]:
        """For `metrics_table`."""
        return {
            "requests": dict(self.requests),
            "errors": dict(self.errors),
            "ttft": {label: found.report() for label, found in self.ttft.items()},
        }

    def _drop(self, name: str) -> None:
        self.requests.pop(name, None)
        self.ttft.pop(name, None)
        for key in [key for key in self.errors if key[0] == name]:
            del self.errors[key]


_counts: list[RequestCounts] = []


def counts() -> RequestCounts:
    """Those of this process."""
    if not _counts:
        options = config.published() or config.GraftConfig()
        _counts.append(RequestCounts(options.metrics_adapters))
    return _counts[0]


def _label(manager: Any, obj: Any) -> str:
    name = obj.lora_path
    if not isinstance(name, str) or not name:
        return BASE
    return counts().labels.label(name) if name in manager.lora_ref_cache else UNKNOWN


def _counts_for(obj: Any) -> bool:
    return bool(getattr(obj, "log_metrics", True))


def reason_of(error: BaseException | None) -> str:
    """What a request died of, as the label says it."""
    if isinstance(error, _LEFT) or "disconnected from the client" in str(error):
        return "cancelled"
    if type(error).__name__ == "RequestAbortedError":
        return "aborted"
    status = getattr(error, "status_code", None)
    if status is None and isinstance(error, ValueError):
        return "bad_request"
    return _REASONS.get(int(status or 0), "internal")


def removed(
    original: Callable[..., Any], self: Any, rid: str, lifecycle_id: object | None = None
) -> Any:
    """AROUND `_remove_req_state`."""
    is_sample = rid in self.child_rid_to_logical_rid
    state = original(self, rid, lifecycle_id)
    if state is None or is_sample or not _counts_for(state.obj):
        return state
    name = state.obj.lora_path
    if not isinstance(name, str) or not name:
        counts().ended(None)
    elif name in self.lora_ref_cache:
        counts().ended(name)
    else:
        counts().ended_unknown()
    return state


def finished(self: Any, out: dict[str, Any], state: Any, is_stream: bool) -> None:
    """BEFORE `_handle_abort_finish_reason`."""
    if not _counts_for(state.obj):
        return
    meta, label = out["meta_info"], _label(self, state.obj)
    if meta["finish_reason"].get("type") == "abort":
        status = meta["finish_reason"].get("status_code")
        reason = "aborted" if status is None else _REASONS.get(int(status), "internal")
        counts().failed(label, reason)
    elif state.time_stats.first_token_time and meta.get("completion_tokens", 1):
        counts().answered(label, state.time_stats.get_first_token_latency())


def discarded(self: Any, obj: Any, lifecycle_ids: dict[str, object] | None = None) -> None:
    """BEFORE `_discard_pending_req_states`, inside the `except` clause that calls it."""
    error = sys.exception()
    for rid in self._logical_rids(obj):
        state = self.rid_to_state.get(rid)
        if state is None or not _counts_for(state.obj):
            continue
        if lifecycle_ids is None or lifecycle_ids.get(rid) is state.lifecycle_id:
            counts().failed(_label(self, state.obj), reason_of(error))


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
HOOKS = (
    Hook(
        target=_MANAGER + "_remove_req_state",
        kind="around",
        function=removed,
        parameters=("self", "rid", "lifecycle_id"),
        reason="requests by adapter for /metrics",
    ),
    Hook(
        target=_MANAGER + "_handle_abort_finish_reason",
        kind="before",
        function=finished,
        parameters=("self", "out", "state", "is_stream"),
        reason="first tokens and errors by adapter for /metrics",
    ),
    Hook(
        target=_MANAGER + "_discard_pending_req_states",
        kind="before",
        function=discarded,
        parameters=("self", "obj", "lifecycle_ids"),
        reason="errors by adapter for /metrics",
    ),
)
