"""Requests of tenants, where every way into the server has become one.

Targets (0.5.17):
- BEFORE `TokenizerManager._init_req_state`: all requests pass it before anything is kept or loaded
  for them, with the adapter that their model field or path came to. What a client may not set is
  taken away or refused here, and what the tenant may not use is 403;
- AFTER `TokenizerManager._create_tokenized_object`: the tenant goes to the scheduler with the
  request (see `tenants/carrier`), and its prompt is counted;
- BEFORE `TokenizerManager._handle_batch_output`: its answer is counted as it comes;
- AROUND `OpenAIServingResponses.create_responses`, `retrieve_responses` and `cancel_responses`:
  SGLang keeps responses by an id that any client can name.

SGLang aborts every request whose id begins with that of one whose client has left, and clients may
choose ids. So a tenant's ids begin with its name.
"""

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import HTTPException
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

from sglang_graft.engine.hooks import Hook
from sglang_graft.serving import names, tenants
from sglang_graft.tenants import carrier

_TENANT, _COUNTED = "_graft_tenant", "_graft_counted"
FORBIDDEN = 403


class ForbiddenError(ValueError):
    """The tenant may not do this. SGLang puts `status_code` into streamed errors."""

    status_code = FORBIDDEN


def claim(self: Any, obj: Any, request: Any = None, lifecycle_id: Any = None) -> None:
    """BEFORE `_init_req_state`."""
    if lifecycle_id is not None:
        return  # one sample of a request that was here before
    # Both are SGLang's own to set: an id would reach any adapter, an address any process.
    obj.lora_id = None
    obj.http_worker_ipc = None
    state, tenant = tenants.current(), tenants.tenant_now()
    if state is None or tenant is None:
        return
    if getattr(obj, "session_params", None) or getattr(obj, "session_id", None):
        _refuse(obj, "Sessions are the operator's: this API key may not use one.")
    wanted = getattr(obj, "lora_path", None)
    for name in wanted if isinstance(wanted, list) else [wanted]:
        if not tenants.may_use(name or None):
            _refuse(obj, tenants.forbidden(name or None))
    settings = state.table.tenants[tenant]
    own = f"{tenants.RID_PREFIX}{tenant}:"
    if isinstance(obj.rid, list):
        obj.rid = [_own_id(rid, tenant, own) for rid in obj.rid]
    else:
        obj.rid = _own_id(obj.rid, tenant, own)
    obj.priority = None
    if self.enable_priority_scheduling:
        low_first = self.server_args.schedule_low_priority_values_first
        obj.priority = -settings.priority if low_first else settings.priority
    samples = getattr(obj, "batch_size", 1) * getattr(obj, "parallel_sample_num", 1)
    state.meter.requests(tenant, samples - 1)  # the gate has counted one


def _own_id(rid: str, tenant: str, own: str) -> str:
    responses = f"{tenants.RESPONSE_PREFIX}{tenant}:"
    return rid if rid.startswith(responses) else own + rid


def _refuse(obj: Any, message: str) -> None:
    # What `/generate` streams has begun by now; SGLang turns a ValueError into its last event.
    if getattr(obj, "stream", False) and not names.nothing_sent():
        raise ForbiddenError(message)
    raise HTTPException(status_code=FORBIDDEN, detail=message)


def carry(result: Any, self: Any, obj: Any, *_: Any, **__: Any) -> None:
    """AFTER `_create_tokenized_object`."""
    state = tenants.current()
    if state is None:
        return
    tenant = tenants.tenant_now()
    settings = None if tenant is None else state.table.tenants.get(tenant)
    if isinstance(result, TokenizedGenerateReqInput):
        shared = settings is not None and settings.share_kv
        result.extra_key = carrier.encode(tenant, result.extra_key or "", shared=shared)
    if tenant is not None:
        setattr(obj, _TENANT, tenant)
        state.meter.tokens(tenant, len(result.input_ids or ()))


def count(self: Any, recv_obj: Any) -> None:
    """BEFORE `_handle_batch_output`: the tokens that came since the last output."""
    state, totals = tenants.current(), getattr(recv_obj, "completion_tokens", None)
    if state is None or not totals:
        return
    for rid, total in zip(recv_obj.rids, totals, strict=True):
        request = self.rid_to_state.get(rid)
        tenant = getattr(request.obj, _TENANT, None) if request is not None else None
        if request is not None and tenant is not None:
            state.meter.tokens(tenant, total - getattr(request.obj, _COUNTED, 0))
            setattr(request.obj, _COUNTED, total)


def _is_foreign(response_id: str | None) -> bool:
    """Whether a stored response is another's, for the sender of the request under way."""
    tenant = tenants.tenant_now()
    if tenant is None or response_id is None or not response_id.startswith("resp_"):
        return False
    return not response_id.startswith(f"{tenants.RESPONSE_PREFIX}{tenant}:")


async def create_response(
    original: Callable[..., Awaitable[Any]], self: Any, request: Any, raw_request: Any = None
) -> Any:
    """AROUND `create_responses`: an id of the tenant's own; what it continues is its own too."""
    if _is_foreign(request.previous_response_id):
        return self._make_not_found_error(request.previous_response_id)
    tenant = tenants.tenant_now()
    if tenant is not None:
        request.request_id = f"{tenants.RESPONSE_PREFIX}{tenant}:{uuid.uuid4().hex}"
    return await original(self, request, raw_request)


async def find_response(
    original: Callable[..., Awaitable[Any]], self: Any, response_id: str
) -> Any:
    """AROUND `retrieve_responses` and `cancel_responses`: another's is not there."""
    if _is_foreign(response_id):
        return self._make_not_found_error(response_id)
    return await original(self, response_id)


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_RESPONSES = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"

HOOKS = (
    Hook(
        target=f"{_MANAGER}._init_req_state",
        kind="before",
        function=claim,
        parameters=("self", "obj", "request", "lifecycle_id"),
        reason="a tenant uses what it may, under names of its own",
    ),
    Hook(
        target=f"{_MANAGER}._create_tokenized_object",
        kind="after",
        function=carry,
        parameters=(
            *("self", "obj", "input_text", "input_ids", "input_embeds", "mm_inputs"),
            "token_type_ids",
        ),
        reason="the scheduler learns the tenant of each request",
    ),
    Hook(
        target=f"{_MANAGER}._handle_batch_output",
        kind="before",
        function=count,
        parameters=("self", "recv_obj"),
        reason="tokens of answers count for their tenants",
    ),
    Hook(
        target=f"{_RESPONSES}.create_responses",
        kind="around",
        function=create_response,
        parameters=("self", "request", "raw_request"),
        reason="stored responses belong to tenants",
    ),
    Hook(
        target=f"{_RESPONSES}.retrieve_responses",
        kind="around",
        function=find_response,
        parameters=("self", "response_id"),
        reason="no tenant reads another's response",
    ),
    Hook(
        target=f"{_RESPONSES}.cancel_responses",
        kind="around",
        function=find_response,
        parameters=("self", "response_id"),
        reason="no tenant cancels another's response",
    ),
)
