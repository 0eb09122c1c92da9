"""An unload answers at once; the adapter is forgotten with its last request, and once."""

import asyncio

import pytest
from manager import PAGES, Manager


def test_an_idle_adapter_is_forgotten_at_once() -> None:
    async def scenario() -> None:
        manager = Manager()
        answer = await manager.unload("legal")
        assert (answer.success, answer.requests) == (True, 0)
        assert (answer.freed_pages, answer.following_pages) == (PAGES, 0)
        assert answer.freed_bytes == PAGES * 100
        assert (manager.retired, manager.forgotten) == (["v1"], ["legal"])
        assert manager.lora_ref_cache == {}

    asyncio.run(scenario())


def test_requests_under_way_keep_it_until_the_last_has_ended() -> None:
    async def scenario() -> None:
        manager = Manager()
        adapter_id = await manager.lora_registry.acquire("legal")
        for rid in ("r1", "r2"):
            manager.request(rid, adapter_id)
        manager.request("other", None)
        answer = await manager.unload("legal")
        assert (answer.requests, answer.freed_pages, answer.following_pages) == (2, 0, PAGES)
        assert set(manager.lora_registry.retired) == {adapter_id}
        del manager.rid_to_state["r1"]
        await asyncio.sleep(0.2)
        assert manager.forgotten == []
        del manager.rid_to_state["r2"]
        await manager.reaped()
        assert manager.forgotten == ["legal"]
        assert manager.lora_registry.retired == {}

    asyncio.run(scenario())


def test_a_caller_that_gives_up_leaves_no_half_done_unload() -> None:
    async def scenario() -> None:
        manager = Manager()
        work = asyncio.create_task(manager.unload("legal"))
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await asyncio.sleep(0.1)
        assert (manager.retired, manager.forgotten) == (["v1"], ["legal"])

    asyncio.run(scenario())


def test_c62_of_parallel_unloads_one_succeeds() -> None:
    async def scenario() -> None:
        manager = Manager()
        results = await asyncio.gather(*(manager.unload("legal") for _ in range(10)))
        failed = [result.error_message for result in results if not result.success]
        assert len(failed) == 9
        assert all("legal is not loaded. Loaded adapters: none" in text for text in failed)

    asyncio.run(scenario())


def test_an_unload_waits_for_loads_of_its_own_name_only() -> None:
    async def scenario() -> None:
        manager = Manager()
        manager.reading = asyncio.Event()
        loads = [asyncio.create_task(manager.load(f"a{n}", f"p{n}")) for n in range(3)]
        await asyncio.sleep(0.05)
        answer = await manager.unload("legal")
        assert answer.success
        assert not any(load.done() for load in loads), "they still read"
        own = asyncio.create_task(manager.unload("a0"))
        await asyncio.sleep(0.05)
        assert not own.done()
        manager.reading.set()
        assert all(result.success for result in await asyncio.gather(*loads))
        assert (await own).success, "it followed its load"
        assert sorted(manager.names().values()) == ["a1", "a2"]

    asyncio.run(scenario())


def test_an_unload_behind_a_replacement_takes_the_new_weights() -> None:
    async def scenario() -> None:
        manager = Manager()
        manager.reading = asyncio.Event()
        replacing = asyncio.create_task(manager.load("legal", "v2", inplace=True))
        await asyncio.sleep(0.05)
        unloading = asyncio.create_task(manager.unload("legal"))
        await asyncio.sleep(0.05)
        manager.reading.set()
        assert (await replacing).success
        assert (await unloading).success
        assert manager.retired == ["v1", "v2"]
        assert manager.forgotten == ["legal", "legal"]

    asyncio.run(scenario())
