"""Routes for those who run the server: readiness, and the drain."""

from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_graft import config
from sglang_graft.serving import readiness, request_log
from sglang_graft.serving.drain import ATTRIBUTE, Drain, Gate
from sglang_graft.serving.readiness import Readiness, Ready
from sglang_graft.serving.request_id import RequestId

router = APIRouter(tags=["graft"])
READINESS = "_graft_readiness"
"""Of a tokenizer manager: its Readiness."""


class Draining(BaseModel):
    """The answer of POST /graft/drain."""

    draining: bool
    requests: int
    """Requests under way."""
    seconds: float
    """After these they are aborted."""


def _manager() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager


@router.get("/health/ready", responses={503: {"model": Ready}})
async def ready(response: Response) -> Ready:
    """Whether requests should come here; 503 with the reason when they should not."""
    found: Ready = getattr(_manager(), READINESS).look()
    response.status_code = 200 if found.ready else 503
    return found


@router.post("/graft/drain", status_code=202)
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def drain() -> Draining:
    """End the server once the requests under way have ended. It cannot be taken back."""
    found: Drain = getattr(_manager(), ATTRIBUTE)
    found.begin()
    return Draining(draining=True, requests=found.under_way(), seconds=found.seconds)


def add_to(app: Any, manager: Any, options: config.GraftConfig, lora_paths: Any) -> None:
    """Routes and middleware, and what they know about `manager`."""
    made = Drain(manager, options.drain_seconds, options.drain_notice_seconds)
    warm = readiness.names(options.warm, lora_paths or ())
    setattr(manager, ATTRIBUTE, made)
    setattr(manager, READINESS, Readiness(manager, made, warm))
    if options.request_log:
        request_log.start(manager, options.request_log)
    app.include_router(router)
    app.add_middleware(Gate, drain=made)
    app.add_middleware(RequestId)
    readiness.run_with(app, getattr(manager, READINESS))
