"""The probe counts what a server without Graft holds, and changes nothing."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sglang_graft.engine import stock_probe
from sglang_graft.engine.hooks import problem

LEGAL, SALES, GONE = "a" * 32, "b" * 32, "c" * 32


@pytest.fixture(autouse=True)
def _no_loads() -> None:
    stock_probe._loads.clear()


def tree(**tokens: int) -> RadixCache:
    """A stock tree with so many cached tokens below each extra key."""
    found = RadixCache.create_simulated()
    for extra, count in tokens.items():
        key = RadixKey(array("q", range(count)), None if extra == "base" else extra)
        found.insert(InsertParams(key=key, value=torch.arange(count)))
    return found


def scheduler(cache: RadixCache, resident: dict[str | None, int] | None) -> Any:
    pool = SimpleNamespace(uid_to_buffer_id=resident, max_loras_per_batch=4)
    refs = {uid: SimpleNamespace(lora_name=f"name-{uid[0]}") for uid in (LEGAL, SALES, GONE)}
    manager = SimpleNamespace(memory_pool=pool, lora_refs=refs)
    runner = SimpleNamespace(lora_manager=None if resident is None else manager)
    return SimpleNamespace(
        tree_cache=cache,
        tp_worker=SimpleNamespace(model_runner=runner),
        max_total_num_tokens=1000,
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 800),
    )


def test_kv_of_an_adapter_in_no_slot_is_invalid() -> None:
    cache = tree(**{LEGAL: 30, "salt" + SALES: 20, "base": 7})
    cache.insert(
        InsertParams(key=RadixKey(array("q", [*range(10), 99]), LEGAL), value=torch.arange(11))
    )
    for uid in (LEGAL, LEGAL, GONE):
        stock_probe.count_load(None, None, uid, 0)
    stock_probe.count_load(None, None, None, 0)
    found = stock_probe.probe(scheduler(cache, {None: 0, LEGAL: 1}))
    assert found["seconds"] >= 0
    assert {key: value for key, value in found.items() if key != "seconds"} == {
        "tokens_total": 1000,
        "tokens_free": 800,
        "tokens_cached": 58,
        "tokens_invalid": 20,
        "slots_total": 4,
        "slots_used": 1,
        "loads": {"name-a": 2, "name-c": 1},
        "evictions": 2,
    }


def test_a_server_without_adapters() -> None:
    found = stock_probe.probe(scheduler(tree(base=12), None))
    assert (found["tokens_cached"], found["tokens_invalid"], found["slots_total"]) == (12, 0, 0)
    assert (found["loads"], found["evictions"]) == ({}, 0)


def test_the_answer_carries_the_probe() -> None:
    result = SimpleNamespace(internal_state={"x": 1})
    stock_probe.add_probe(result, scheduler(tree(base=12), None), None)
    assert set(result.internal_state) == {"x", stock_probe.KEY}


@pytest.mark.parametrize("hook", stock_probe.HOOKS, ids=lambda hook: hook.target)
def test_targets_are_as_they_were(hook: Any) -> None:
    assert problem(hook, live=False) is None
