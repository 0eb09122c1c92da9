"""The tenants of this server, and which of them asks.

The file is read when the server starts and again when it changes. A new state is checked as a
whole, then given to the scheduler, which checks page floors and caps against its pool, and only
then used here; anything wrong keeps the old state, is logged, and stands in GET /graft/tenants.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse

from sglang_graft.serving.control import RefusedOperationError, ask
from sglang_graft.tenants import Meter, Tenant, TenantsError, TenantTable, key_id, read

logger = logging.getLogger(__name__)

SECONDS = 1.0
"""Time between two looks at the file."""
RID_PREFIX = "t:"
RESPONSE_PREFIX = "resp_t:"


@dataclass(frozen=True)
class Caller:
    """Who sent the HTTP request under way; `tenant` None is the operator.

    reached: adapters that an alias of this request leads to, which the tenant may use by it.
    """

    tenant: str | None
    reached: set[str] = field(default_factory=set)


_caller: ContextVar[Caller | None] = ContextVar("graft_caller", default=None)
_current: "list[Tenants]" = []


class Tenants:
    """The present state of one tenants file."""

    def __init__(self, path: Path, tenants: Mapping[str, Tenant]) -> None:
        self.path = path
        self.table = TenantTable(tenants)
        self.meter = Meter(time.monotonic)
        self.meter.configure(tenants)
        self.error: str | None = None
        """Why the file as it is now is not used."""
        self.changes = 0
        """How often a changed file was taken over since start."""
        self.changing = asyncio.Lock()
        """Held while a new state is looked at, checked and taken over."""
        self._seen: tuple[int, ...] | None = None
        self._watcher: asyncio.Task[None] | None = None

    def start(self, manager: Any) -> None:
        """Watch the file from now on; the second call does nothing."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(manager))
            self._watcher.add_done_callback(_watch_ended)

    async def look(self, manager: Any) -> None:
        """Take over the file if it has changed since the last look."""
        async with self.changing:
            await self.look_now(manager)

    async def look_now(self, manager: Any) -> None:
        """As `look`, for whoever holds `changing`."""
        seen = await asyncio.to_thread(signature, self.path)
        if seen == self._seen:
            return
        try:
            tenants = await asyncio.to_thread(read, self.path)
            await ask(manager, "set_tenants", tenants=limits(tenants))
        except (TenantsError, RefusedOperationError) as error:
            self.error = str(error)
            logger.error("The tenants stay as they were: %s", error)
            self._seen = seen
        else:
            self.take(tenants, seen)

    def take(self, tenants: Mapping[str, Tenant], seen: tuple[int, ...]) -> None:
        """Use a state that the scheduler has taken over; `seen`: of the file that says so."""
        if tenants != self.table.tenants:
            self.table = TenantTable(tenants)
            self.meter.configure(tenants)
            self.changes += 1
            logger.info("Tenants from %s: %s", self.path, ", ".join(tenants) or "none")
        self.error = None
        self._seen = seen

    async def _watch(self, manager: Any) -> None:
        while True:
            await self.look(manager)
            await asyncio.sleep(SECONDS)

    def report(self) -> dict[str, Any]:
        """Everything but keys: those by the first digits of their hashes."""
        shown = {}
        for name, tenant in self.table.tenants.items():
            row = tenant.model_dump(mode="json")
            row["keys"] = [key_id(key) for key in tenant.keys]
            row["refused_by_rate"] = self.meter.refused.get(name, 0)
            shown[name] = row
        return {
            "file": str(self.path),
            "error": self.error,
            "changes": self.changes,
            "tenants": shown,
        }


def limits(tenants: Mapping[str, Tenant]) -> dict[str, dict[str, Any]]:
    """What the scheduler has to know of each tenant, as plain JSON."""
    fields = {"page_floor", "page_cap", "priority"}
    return {name: tenant.model_dump(include=fields) for name, tenant in tenants.items()}


def set_current(tenants: Tenants | None) -> None:
    """The tenants of this process; None: there are none, and one key serves everybody."""
    _current[:] = [] if tenants is None else [tenants]


def current() -> Tenants | None:
    """The tenants of this process."""
    return _current[0] if _current else None


def set_caller(caller: Caller | None) -> None:
    """Say for the rest of this HTTP request who sent it."""
    _caller.set(caller)


def tenant_now() -> str | None:
    """The tenant that sent the HTTP request under way; None: the operator, or no tenants at all."""
    caller = _caller.get()
    return None if caller is None else caller.tenant


def reach(alias: str, adapter: str) -> None:
    """An alias of the request under way leads to `adapter`: who may use the one may use it by that.

    For whoever resolves aliases, before the request goes on.
    """
    tenants, caller = current(), _caller.get()
    if tenants is None or caller is None or caller.tenant is None:
        return
    if tenants.table.may_use(caller.tenant, alias):
        caller.reached.add(adapter)


def may_use(name: str | None) -> bool:
    """Whether the sender of the request under way may use an adapter, or (None) the base model."""
    tenants, caller = current(), _caller.get()
    if tenants is None or caller is None or caller.tenant is None:
        return True
    if name is None:
        return tenants.table.may_use_base(caller.tenant)
    return name in caller.reached or tenants.table.may_use(caller.tenant, name)


def visible(names: Iterable[str]) -> list[str]:
    """Those adapters and aliases of `names` that the sender may know of."""
    return [name for name in names if may_use(name)]


def visible_cards(cards: Iterable[Any]) -> list[Any]:
    """Those cards of /v1/models that the sender may know of; a card without parent is the base."""
    if tenant_now() is None:
        return list(cards)
    return [card for card in cards if may_use(card.id if card.parent else None)]


def forbidden(name: str | None) -> str:
    """The message for what a key may not use. The same whether or not such an adapter exists."""
    what = "the base model" if name is None else f"an adapter or model named {name[:256]!r}"
    return f"This API key may not use {what}."


def no_such_model(name: str) -> JSONResponse:
    """SGLang's answer of /v1/models/NAME where nothing has the name."""
    found = {
        "message": f"The model '{name[:256]}' does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return JSONResponse({"error": found}, status_code=404)


def signature(path: Path) -> tuple[int, ...]:
    """Differs when a file was written or replaced; the same for every file that is not there."""
    try:
        found = path.stat()
    except OSError:
        return (0,)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _watch_ended(watcher: "asyncio.Task[None]") -> None:
    if not watcher.cancelled() and watcher.exception() is not None:
        logger.error("The tenants file is no longer watched", exc_info=watcher.exception())
