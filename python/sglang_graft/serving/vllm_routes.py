"""Loading and unloading as vLLM's clients do it.

They send `lora_name` and `lora_path`, take any 200 for success (the text is for people), and read
errors as OpenAI's: `{"error": {"message": ...}}`. Controllers repeat an unload until it succeeds,
so what is not loaded is unloaded. What happens to requests, bytes and KV is the same as on SGLang's
own routes (`serving/load`, `serving/unload`).
"""

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, Field
from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_graft.serving.load_input import LoadInput

router = APIRouter(prefix="/v1", tags=["vllm"])


class LoadBody(BaseModel):
    """POST /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    """Replace an adapter of that name, if there is one."""


class UnloadBody(BaseModel):
    """POST /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = None
    """Of vLLM's own books; a name is all that is needed here."""


@router.post("/load_lora_adapter")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def load_lora_adapter(body: LoadBody, request: Request) -> Response:
    """Load an adapter. A name that is taken is 400, whatever its path, unless `load_inplace`."""
    manager = _manager()
    if not body.load_inplace and manager.lora_registry.ref(body.lora_name) is not None:
        return _error(
            f"The lora adapter '{body.lora_name}' has already been loaded. Unload it first, or set"
            " load_inplace to replace it."
        )
    wanted = LoadInput(
        lora_name=body.lora_name, lora_path=body.lora_path, load_inplace=body.load_inplace
    )
    result = await manager.load_lora_adapter(wanted, request)
    if not result.success:
        return _error(result.error_message)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/unload_lora_adapter")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def unload_lora_adapter(body: UnloadBody, request: Request) -> Response:
    """Unload an adapter; one that is not loaded is success too."""
    manager = _manager()
    result = await manager.unload_lora_adapter(
        UnloadLoRAAdapterReqInput(lora_name=body.lora_name), request
    )
    if not result.success and manager.lora_registry.ref(body.lora_name) is not None:
        return _error(result.error_message)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _manager() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server.get_global_state().tokenizer_manager


def _error(message: str) -> JSONResponse:
    code = int(HTTPStatus.BAD_REQUEST)
    error = {"message": message, "type": "BadRequestError", "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=code)
