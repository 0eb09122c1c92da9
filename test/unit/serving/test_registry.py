"""An adapter's requests are those whose states are there: nothing is counted, nothing drifts."""

import asyncio

import pytest
from manager import Manager

from sglang_graft.serving.registry import in_flight


def test_acquire_never_suspends() -> None:
    registry = Manager().lora_registry
    ref = registry.ref("legal")
    assert ref is not None
    for wanted, names in ((ref.lora_id, "legal"), ([None, ref.lora_id], [None, "legal"])):
        coroutine = registry.acquire(names)
        with pytest.raises(StopIteration) as done:
            coroutine.send(None)
        assert done.value.value == wanted


def test_a_name_that_went_is_an_error() -> None:
    registry = Manager().lora_registry
    registry.take("legal")
    with pytest.raises(ValueError, match=r"legal was unloaded .* Loaded adapters: none"):
        asyncio.run(registry.acquire(["legal"]))
    with pytest.raises(ValueError, match="legal is not loaded"):
        registry.take("legal")


def test_c50_releases_too_many_or_too_few_change_nothing() -> None:
    async def scenario() -> None:
        manager = Manager()
        registry = manager.lora_registry
        adapter_id = await registry.acquire("legal")
        manager.request("r", adapter_id)
        manager.request("base", None)
        for _ in range(3):
            await registry.release(adapter_id)
            await registry.release([adapter_id, None])
        assert in_flight(manager) == {adapter_id: 1}
        del manager.rid_to_state["r"]
        assert in_flight(manager) == {}
        assert [counter.value() for counter in registry._counters.values()] == [0]

    asyncio.run(scenario())
