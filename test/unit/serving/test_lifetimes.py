"""Time-to-live, by a clock of the test's own."""

import asyncio
from typing import Any

import pytest
from manager import Manager

from sglang_graft.serving import lifetimes as module
from sglang_graft.serving.aliases import aliases
from sglang_graft.serving.lifetimes import lifetimes


class Timed(Manager):
    """A manager whose clock stands still until the test moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.lora_registry.clock = lambda: self.now
        self.lora_registry.used["legal"] = self.now
        self.times = lifetimes(self)

    async def unload_lora_adapter(self, obj: Any, request: Any = None) -> Any:
        return await self.unload(obj.lora_name)

    async def after(self, seconds: float) -> list[str]:
        """The names that are loaded after so long."""
        self.now += seconds
        await self.times.expire()
        return sorted(self.lora_registry.get_all_adapters())


def test_an_unused_adapter_goes_when_its_time_is_up() -> None:
    async def scenario() -> None:
        manager = Timed()
        await manager.load("poet", "p1")
        manager.times.set("poet", 10)
        assert await manager.after(9) == ["legal", "poet"]
        await manager.lora_registry.acquire("poet")
        assert await manager.after(9) == ["legal", "poet"], "it was used"
        assert manager.times.idle("poet") == 9
        assert await manager.after(1) == ["legal"]
        assert manager.times.get("poet") is None

    asyncio.run(scenario())


def test_requests_pins_and_aliases_keep_it() -> None:
    async def scenario() -> None:
        manager = Timed()
        manager.times.set("legal", 10)
        manager.request("r", await manager.lora_registry.acquire("legal"))
        assert await manager.after(50) == ["legal"]
        manager.rid_to_state.clear()
        assert await manager.after(9) == ["legal"], "it was in use until just now"
        aliases(manager).change({"line": "legal"})
        assert await manager.after(50) == ["legal"]
        aliases(manager).change({"line": None})
        manager.lora_registry.repin("legal", True)
        assert await manager.after(50) == ["legal"]
        manager.lora_registry.repin("legal", False)
        assert await manager.after(0) == []

    asyncio.run(scenario())


def test_a_name_that_is_unloaded_and_loaded_again_has_no_time() -> None:
    async def scenario() -> None:
        manager = Timed()
        manager.times.set("legal", 10)
        await manager.load("legal", "v2", inplace=True)
        assert manager.times.get("legal") == 10, "a replacement is the same adapter to its users"
        await manager.unload("legal")
        await manager.load("legal", "v3")
        assert manager.times.get("legal") is None
        assert await manager.after(1000) == ["legal"]

    asyncio.run(scenario())


def test_a_folder_below_a_root_keeps_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Folders:
        def candidate(self, name: str) -> str:
            return name

    monkeypatch.setattr(module, "on_demand", lambda manager: Folders())

    async def scenario() -> None:
        manager = Timed()
        manager.times.set("legal", 10)
        assert await manager.after(10) == []
        await manager.load("legal", "v1")
        assert manager.times.get("legal") == 10
        assert await manager.after(10) == []

    asyncio.run(scenario())


def test_the_watch_runs_while_there_is_something_to_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.005)

    async def scenario() -> None:
        manager = Timed()
        manager.times.set("legal", 10)
        manager.now += 10
        for _ in range(400):
            await asyncio.sleep(0.005)
            if manager.times._task is not None and manager.times._task.done():
                break
        assert manager.lora_registry.ref("legal") is None
        assert manager.times._task is not None
        assert manager.times._task.done()

    asyncio.run(scenario())
