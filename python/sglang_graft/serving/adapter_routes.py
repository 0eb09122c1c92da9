"""Routes that control single adapters and aliases; all need the admin key where one is set."""

from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request
from pydantic import BaseModel, ConfigDict
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_graft.serving import adapter_admin, aliases, dry_run
from sglang_graft.serving.adapter_admin import AdminError, NewAdapter, Settings

router = APIRouter(prefix="/graft", tags=["adapters"])

DryRun = Annotated[bool, Query(description="Only say what would happen.")]


class Target(BaseModel):
    """Body of PUT /graft/aliases/ALIAS."""

    model_config = ConfigDict(extra="forbid")

    adapter: str


def _manager() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager


def _refused(error: AdminError) -> HTTPException:
    return HTTPException(status_code=error.status_code, detail=str(error))


@router.get("/adapters")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def list_adapters() -> dict[str, Any]:
    """Loaded adapters, folders below the roots that could be loaded, and aliases."""
    return await adapter_admin.listing(_manager())


@router.post("/adapters")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def load_adapter(body: NewAdapter, request: Request, dry_run: DryRun = False) -> Any:
    """Load an adapter, or replace one in place."""
    try:
        if dry_run:
            return await _load_forecast(body)
        return await adapter_admin.load(_manager(), body, request)
    except AdminError as error:
        raise _refused(error) from None


async def _load_forecast(body: NewAdapter) -> dict[str, Any]:
    return await dry_run.load_forecast(_manager(), body)


@router.get("/adapters/{name:path}")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_adapter(name: str) -> Any:
    """One loaded adapter."""
    try:
        return await adapter_admin.one(_manager(), name)
    except AdminError as error:
        raise _refused(error) from None


@router.patch("/adapters/{name:path}")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def change_adapter(name: str, body: Settings, dry_run: DryRun = False) -> Any:
    """Pin, unpin, time-to-live, priority, or warm up; what is left out stays as it is."""
    try:
        if dry_run:
            return await adapter_admin.why(_manager(), name, pin=body.pinned)
        return await adapter_admin.change(_manager(), name, body)
    except AdminError as error:
        raise _refused(error) from None


@router.delete("/adapters/{name:path}")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def unload_adapter(name: str, request: Request, dry_run: DryRun = False) -> Any:
    """Unload an adapter, and say what was freed and what follows with its last request."""
    try:
        if dry_run:
            return await adapter_admin.unload_forecast(_manager(), name)
        return await adapter_admin.unload(_manager(), name, request)
    except AdminError as error:
        raise _refused(error) from None


@router.get("/why/{name:path}")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def why(name: str, pin: bool = False) -> Any:
    """Whether the adapter would fit on the device now, and what would leave for it."""
    try:
        return await adapter_admin.why(_manager(), name, pin=pin)
    except AdminError as error:
        raise _refused(error) from None


@router.get("/aliases")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def list_aliases() -> dict[str, str]:
    """Every alias and the adapter that it leads to."""
    return dict(sorted(aliases.aliases(_manager()).table.items()))


@router.patch("/aliases")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def change_aliases(body: dict[str, str | None]) -> dict[str, str]:
    """Switch several aliases in one step; null takes one away. All of it happens, or nothing."""
    return await _change(body)


@router.get("/aliases/{alias:path}")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_alias(alias: str) -> dict[str, str]:
    """The adapter that an alias leads to."""
    target = aliases.aliases(_manager()).table.get(alias)
    if target is None:
        raise HTTPException(status_code=404, detail=f"There is no alias {alias!r}.")
    return {"alias": alias, "adapter": target}


@router.put("/aliases/{alias:path}")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def put_alias(alias: str, body: Target) -> dict[str, str]:
    """Let an alias lead to an adapter, in one step; requests under way keep what they have."""
    await _change({alias: body.adapter})
    return {"alias": alias, "adapter": body.adapter}


@router.delete("/aliases/{alias:path}")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def delete_alias(alias: str) -> dict[str, str]:
    """Take an alias away."""
    target = (await get_alias(alias))["adapter"]
    await _change({alias: None})
    return {"alias": alias, "adapter": target}


async def _change(changes: dict[str, str | None]) -> dict[str, str]:
    reason = await aliases.change(_manager(), changes)
    if reason is not None:
        raise HTTPException(status_code=409, detail=reason)
    return await list_aliases()
