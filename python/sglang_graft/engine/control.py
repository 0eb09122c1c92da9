"""Operations that the HTTP process asks of the scheduler, and the pool report.

Target (0.5.17): AROUND `Scheduler.get_internal_state`. Reasons: its answer is the one message of
SGLang that carries any JSON back; its request carries a text, the `rid`, which no client sets and
SGLang does not read. So `serving/control` names an operation there. A plain request gets the
reports, which `/server_info` shows under `internal_states`.
"""

import json
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput

from sglang_graft.engine import adapter_control, identities, report, tenants, view
from sglang_graft.engine.hooks import Hook

PREFIX = "graft:"
REPLY, ERROR = "graft_reply", "graft_error"

Operation = Callable[[Any, dict[str, Any]], dict[str, Any]]
"""Gets the scheduler and the arguments, returns plain JSON. Runs between two turns of the loop, and
must not wait. ValueError goes back to the caller; an operation that raises it changed nothing."""

OPERATIONS: dict[str, Operation] = {
    "pool": lambda scheduler, _: report.pool_report(scheduler.tree_cache),
    **view.OPERATIONS,
    **tenants.OPERATIONS,
    **adapter_control.OPERATIONS,
    **identities.OPERATIONS,
}


def message(operation: str, arguments: dict[str, Any]) -> GetInternalStateReq:
    """The request that makes `answer` run an operation."""
    return GetInternalStateReq(rid=PREFIX + json.dumps([operation, arguments]))


def answer(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """AROUND `get_internal_state`."""
    rid = recv_req.rid
    if not isinstance(rid, str) or not rid.startswith(PREFIX):
        result = original(self, recv_req)
        result.internal_state |= report.reports(self.tree_cache)
        return result
    operation, arguments = json.loads(rid.removeprefix(PREFIX))
    try:
        state: dict[str, Any] = {REPLY: OPERATIONS[operation](self, arguments)}
    except ValueError as error:
        state = {ERROR: str(error)}
    return GetInternalStateReqOutput(internal_state=state)


HOOKS = (
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        kind="around",
        function=answer,
        parameters=("self", "recv_req"),
        reason="operations on the pool, its report, and what adapters are checked against",
    ),
)
