"""Adapters below the roots: loaded when a request names them, followed when their folders change.

One lock for each name: a request holds it while SGLang counts it in, and whoever loads, replaces or
unloads holds it as well. So no request can fall between the old weights and the new ones. Work on a
name runs in a task of its own that all who want it share, and that a client who leaves cannot stop.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

from sglang_graft.adapters.catalog import Catalog, Entry
from sglang_graft.adapters.folder_names import folder_problem, without_base
from sglang_graft.adapters.folder_scan import Folder, find, scan

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""How long a folder that the scheduler refused is not tried again."""
_LOOKS = 10  # at a folder that a request waits for, before it is told to come back
_ROUNDS = 3  # of a request that finds its adapter unloaded again

Work = Coroutine[Any, Any, "RefusedError | None"]


class RefusedError(ValueError):
    """A request names a folder that cannot serve it: 400 for its content, 503 for a bad moment."""

    def __init__(self, name: str, reason: str, status_code: int = 400) -> None:
        super().__init__(f"Adapter {name!r} cannot be used: {reason}")
        self.status_code = status_code


class Store(Protocol):
    """What loads adapters. Errors are sentences; None is success."""

    def loaded(self, name: str) -> str | None:
        """The id of the adapter that requests get under `name` now."""

    async def load(self, name: str, path: Path) -> str | None:
        """Load the folder `path` under a free name."""

    async def unload(self, name: str) -> str | None:
        """Take the name away, once its requests have ended."""

    async def replace(self, name: str, path: Path) -> str | None:
        """New requests get the folder `path`; those under way keep what they have."""

    async def check(self, path: Path) -> str | None:
        """Why the folder `path` would not be loaded, from its headers."""


class OnDemand:
    """The adapter folders of one server. Without roots it does nothing."""

    def __init__(
        self, roots: Sequence[Path], seconds: float, store: Store, reserved: Collection[str] = ()
    ) -> None:
        self.roots, self.seconds, self.store, self.reserved = roots, seconds, store, reserved
        self.catalog = Catalog()
        self._loaded: dict[str, tuple[str, Folder]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._jobs: dict[str, asyncio.Task[RefusedError | None]] = {}
        self._refused: dict[str, tuple[Folder, RefusedError, float]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()

    def candidate(self, model: str) -> str | None:
        """The folder that a `model` field might name: `NAME`, or `BASE:NAME`."""
        name = without_base(model, self.reserved)
        return name if self.roots and folder_problem(name, self.reserved) is None else None

    @asynccontextmanager
    async def hold(self, names: Iterable[str | None]) -> AsyncIterator[None]:
        """Load what lies below the roots, and keep it until the block ends.

        Raises RefusedError for a folder that cannot be used. A name that is no folder is left as
        it is.
        """
        self.start()
        wanted = sorted({name for name in names if name is not None and self.candidate(name)})
        if not wanted:
            yield
            return
        for _ in range(_ROUNDS):
            there = [name for name in wanted if await self._ensure(name)]
            async with contextlib.AsyncExitStack() as stack:
                for name in there:
                    await stack.enter_async_context(self._lock(name))
                if all(self.store.loaded(name) for name in there):
                    yield
                    return
        raise RefusedError(there[0], "its folder changes all the time; try again", 503)

    def loaded_here(self, name: str) -> bool:
        """Whether the adapter of that name was loaded because a folder below a root has it."""
        return name in self._loaded and self.store.loaded(name) == self._loaded[name][0]

    async def exists(self, name: str) -> bool:
        """Whether `name` is a folder below the roots, usable or not."""
        return self.candidate(name) is not None and await self._find(name) is not None

    async def listed(self) -> list[Folder]:
        """The folders that a request could load now and that nobody has loaded."""
        if not self.roots:
            return []
        self.start()
        await self._settled.wait()
        return [
            folder
            for folder in self.catalog.usable()
            if self.store.loaded(folder.name) is None and not self._was_refused(folder)
        ]

    def start(self) -> None:
        """Watch the roots from now on; the second call does nothing."""
        if self._watcher is None and self.roots:
            self._watcher = asyncio.create_task(self._watch())
            self._watcher.add_done_callback(self._watch_ended)

    async def stop(self) -> None:
        """End the watch and the work under way."""
        tasks = [task for task in (self._watcher, *self._jobs.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watcher = None

    async def look(self) -> None:
        """Look at the roots once, and start what follows from it."""
        try:
            found = await asyncio.to_thread(scan, self.roots, self.reserved)
        except OSError as error:
            logger.warning("Adapter roots cannot be read, nothing changes: %s", error)
            return
        if not found.complete:
            logger.warning("--graft-adapter-root: too many folders, some are not listed")
        changes = self.catalog.observe(found.folders)
        for name in changes.gone:
            self.catalog.drop(name)
            self._refused.pop(name, None)
        for folder in changes.changed:
            await self._check(folder)
        for name, (lora_id, folder) in list(self._loaded.items()):
            entry = self.catalog.get(name)
            if self.store.loaded(name) != lora_id:
                if name not in self._jobs:
                    del self._loaded[name]  # unloaded by hand
            elif entry is None or entry.folder != folder:
                self._start(name, self._follow)

    async def _watch(self) -> None:
        await self.look()
        while True:
            await asyncio.sleep(self.seconds)
            await self.look()
            self._settled.set()  # a first look alone settles nothing

    def _watch_ended(self, watcher: "asyncio.Task[None]") -> None:
        if not watcher.cancelled() and watcher.exception() is not None:
            logger.error("Adapter folders are no longer watched", exc_info=watcher.exception())
            self._settled.set()  # what is known by now is listed

    async def _ensure(self, name: str) -> bool:
        """Whether `name` is a folder of ours or loaded; it is loaded then. Raises RefusedError."""
        while self.store.loaded(name) is None:
            job = self._start(name, self._bring)
            refused = await asyncio.shield(job)
            if job.get_name() != self._bring.__name__:
                continue  # the name was between two contents
            if refused is not None:
                raise refused.with_traceback(None)  # it is raised to everyone who asks
            return self.store.loaded(name) is not None
        return True

    def _start(self, name: str, work: Callable[[str], Work]) -> "asyncio.Task[RefusedError | None]":
        """The work under way on `name`, whatever it is; `work` if there is none."""
        job = self._jobs.get(name)
        if job is None:
            job = asyncio.create_task(self._locked(name, work), name=work.__name__)
            job.add_done_callback(lambda _: self._jobs.pop(name, None))
            self._jobs[name] = job
        return job

    async def _locked(self, name: str, work: Callable[[str], Work]) -> RefusedError | None:
        async with self._lock(name):
            return await work(name)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _bring(self, name: str) -> RefusedError | None:
        """Load the folder that `name` is, if it is one."""
        entry = await self._steady(name)
        if entry is None or isinstance(entry, RefusedError):
            return entry
        folder = entry.folder
        if entry.refusal is not None:
            return RefusedError(name, entry.refusal)
        if self._was_refused(folder) and self._refused[name][2] > asyncio.get_running_loop().time():
            return self._refused[name][1]
        return await self._take(folder, await self.store.load(name, folder.path))

    async def _steady(self, name: str) -> Entry | RefusedError | None:
        """The checked folder, once it has stayed as it is; None when there is none."""
        last = None
        for _ in range(_LOOKS):
            folder = await self._find(name)
            entry = self.catalog.get(name)
            if folder is None or (entry is not None and entry.folder == folder):
                return None if folder is None else entry
            if folder == last:
                return await self._check(folder)
            last = folder
            await asyncio.sleep(self.seconds)
        return RefusedError(name, "its folder is still being written; try again", 503)

    async def _follow(self, name: str) -> RefusedError | None:
        """The folder of a loaded adapter has changed or is gone."""
        entry = self.catalog.get(name)
        if entry is None or entry.refusal is not None:
            why = "its folder is gone" if entry is None else entry.refusal
            logger.warning("Adapter %s is unloaded: %s", name, why)
            error = await self.store.unload(name)
            if self.store.loaded(name) is None:
                self._loaded.pop(name, None)
            return None if error is None else RefusedError(name, error)
        logger.info("Adapter %s has changed and is replaced", name)
        error = await self.store.replace(name, entry.folder.path)
        return await self._take(entry.folder, error)

    async def _take(self, folder: Folder, error: str | None) -> RefusedError | None:
        """Keep what a load has made, unless it failed or read something else than was checked."""
        name = folder.name
        if error is None and await self._find(name) != folder:
            await self.store.unload(name)
            self._loaded.pop(name, None)
            return RefusedError(name, "its folder changed while it was read; try again", 503)
        lora_id = self.store.loaded(name)
        if error is None and lora_id is not None:
            self._loaded[name] = (lora_id, folder)
            self._refused.pop(name, None)
            return None
        self._loaded.pop(name, None)
        refused = RefusedError(name, error or "it was unloaded at once")
        until = asyncio.get_running_loop().time() + RETRY_SECONDS
        self._refused[name] = (folder, refused, until)
        return refused

    async def _check(self, folder: Folder) -> Entry:
        refusal = folder.refusal or await self.store.check(folder.path)
        if refusal is not None:
            logger.warning("Adapter folder %s cannot be used: %s", folder.name, refusal)
        return self.catalog.settle(folder, refusal)

    async def _find(self, name: str) -> Folder | None:
        return await asyncio.to_thread(find, name, self.roots, self.reserved)

    def _was_refused(self, folder: Folder) -> bool:
        refused = self._refused.get(folder.name)
        return refused is not None and refused[0] == folder
