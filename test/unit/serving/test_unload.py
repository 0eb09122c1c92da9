"""An unload ends whatever SGLang's count of requests says, but not before the requests do."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry

from sglang_graft.serving.unload import unload


class Manager:
    """The parts of SGLang's tokenizer manager that an unload touches."""

    def __init__(self) -> None:
        self.ref = LoRARef(lora_name="legal", lora_path="somewhere")
        self.lora_registry = LoRARegistry([self.ref])
        self.lora_ref_cache = {"legal": self.ref}
        self.rid_to_state: dict[str, Any] = {}

    async def original(self, obj: Any) -> str:
        obj.lora_id = await self.lora_registry.unregister(obj.lora_name)
        await self.lora_registry.wait_for_unload(obj.lora_id)
        return "unloaded"


def wrapped(manager: Manager, name: str = "legal") -> Any:
    request = SimpleNamespace(lora_name=name, lora_id=None)
    return unload(Manager.original, manager, request)


@pytest.mark.parametrize("drift", [-1, 0, 2])
def test_an_unload_ends_when_the_count_has_drifted(drift: int) -> None:
    async def scenario() -> None:
        manager = Manager()
        await manager.lora_registry._counters[manager.ref.lora_id].increment(drift)
        assert await asyncio.wait_for(wrapped(manager), timeout=10) == "unloaded"
        assert manager.lora_ref_cache == {}

    asyncio.run(scenario())


def test_an_unload_waits_for_requests_under_way() -> None:
    async def scenario() -> None:
        manager = Manager()
        adapter_id = await manager.lora_registry.acquire("legal")
        manager.rid_to_state["r"] = SimpleNamespace(obj=SimpleNamespace(lora_id=adapter_id))
        work = asyncio.create_task(wrapped(manager))
        done, _ = await asyncio.wait([work], timeout=0.2)
        assert not done
        del manager.rid_to_state["r"]
        assert await asyncio.wait_for(work, timeout=10) == "unloaded"

    asyncio.run(scenario())


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="nobody"):
        asyncio.run(wrapped(Manager(), "nobody"))
