"""A name is taken once, replaced only when asked for, and never left half replaced."""

import asyncio

import pytest
from manager import PAGES, Manager


def test_a_new_name_is_loaded_as_sglang_does_it() -> None:
    async def scenario() -> None:
        manager = Manager()
        answer = await manager.load("poet", "p1")
        assert (answer.success, answer.error_message, answer.freed_pages) == (True, "", 0)
        assert set(manager.lora_ref_cache) == {"legal", "poet"}

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["", "default", "base", "models/base"])
def test_a_name_of_the_base_model_is_refused(name: str) -> None:
    answer = asyncio.run(Manager().load(name, "p1"))
    assert not answer.success
    assert "base model" in answer.error_message


def test_c65_a_loaded_name_is_refused_before_anything_is_read() -> None:
    async def scenario() -> None:
        manager = Manager()
        answer = await manager.load("legal", "broken")
        assert not answer.success
        assert 'already loaded; unload it first, or load it with "load_inplace"' in (
            answer.error_message
        )
        assert list(manager.paths.values()) == ["v1"]

    asyncio.run(scenario())


def test_a_replacement_swaps_and_retires() -> None:
    async def scenario() -> None:
        manager = Manager()
        old = await manager.lora_registry.acquire("legal")
        manager.request("r", old)
        answer = await manager.load("legal", "v2", inplace=True)
        assert (answer.success, answer.requests, answer.following_pages) == (True, 1, PAGES)
        new = await manager.lora_registry.acquire("legal")
        assert new != old
        assert manager.lora_ref_cache["legal"].lora_id == new
        assert list(manager.paths.values()) == ["v2"]
        manager.rid_to_state.clear()
        await manager.reaped()
        assert manager.forgotten == ["legal"]
        assert await manager.lora_registry.acquire("legal") == new

    asyncio.run(scenario())


def test_a_bad_replacement_leaves_the_old_one() -> None:
    async def scenario() -> None:
        manager = Manager()
        old = await manager.lora_registry.acquire("legal")
        answer = await manager.load("legal", "broken", inplace=True)
        assert (answer.success, answer.error_message) == (False, "it is broken")
        assert await manager.lora_registry.acquire("legal") == old
        assert (manager.retired, manager.forgotten) == ([], [])

    asyncio.run(scenario())


def test_parallel_loads_of_one_name_have_one_winner() -> None:
    async def scenario() -> None:
        manager = Manager()
        answers = await asyncio.gather(*(manager.load("poet", f"p{i}") for i in range(10)))
        assert sorted(answer.success for answer in answers) == [False] * 9 + [True]
        assert len(manager.paths) == 2

    asyncio.run(scenario())


def test_replacements_and_unloads_at_once_leave_what_the_registry_says() -> None:
    async def scenario() -> None:
        manager = Manager()
        calls = [manager.load("legal", f"v{i}", inplace=True) for i in range(2, 9)]
        unloads = [manager.unload("legal") for _ in range(3)]
        mixed = [call for pair in zip(calls, unloads, strict=False) for call in pair]
        await asyncio.gather(*mixed, *calls[3:], return_exceptions=True)
        named = {ref.lora_id for ref in manager.lora_registry.get_all_adapters().values()}
        assert set(manager.paths) == named
        assert len(manager.forgotten) == len(manager.retired)

    asyncio.run(scenario())
