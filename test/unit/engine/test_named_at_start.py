"""Adapters named at start: read by several threads, registered one by one in their order."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers_peft as hp
import helpers_residency as hr
import pytest
import torch
from sglang.srt.lora.lora_registry import LoRARef

from sglang_graft import config
from sglang_graft.adapters import AdapterError, BaseWeight, pack, read_adapter
from sglang_graft.cache import HostTier, Lru, Prices, UnifiedTree
from sglang_graft.engine import start
from sglang_graft.engine.lora_manager import GraftLoRAManager, WeightRefs
from sglang_graft.engine.pool import Pool
from sglang_graft.engine.start_adapters import ReadAdapter
from sglang_graft.pool import Arena, PageLedger
from sglang_graft.tiers import HostPool

PAGES = 40


class Backend:
    """The LoRA backend, as far as `bind` calls it."""

    def __init__(self) -> None:
        self.bound = threading.Event()

    def bind(self, *_: Any) -> None:
        self.bound.set()


class Manager(GraftLoRAManager):
    """Without SGLang's model; notes the threads that read, and waits for `needs` before it does."""

    def __init__(self, refs: list[LoRARef]) -> None:
        self.spec, self.base_weight, self.device = hr.SPEC, None, torch.device("cpu")
        self.max_lora_rank, self.max_loras_per_batch = 16, 2
        self.memory_pool = WeightRefs(self.spec, 2, 16, self.device)
        self.lora_backend = Backend()
        self.lora_refs: dict[str, LoRARef] = {}
        self._named_at_start = refs
        self.needs: dict[str, threading.Event] = {}
        self.threads: set[str] = set()
        self.ended: dict[str, threading.Event] = {r.lora_name: threading.Event() for r in refs}

    def read(self, ref: LoRARef, base_weight: BaseWeight | None = None) -> ReadAdapter:
        if ref.lora_name in self.needs:
            assert self.needs[ref.lora_name].wait(30)
        self.threads.add(threading.current_thread().name)
        try:
            return super().read(ref, base_weight)
        finally:
            self.ended[ref.lora_name].set()


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """The start ends, well or not."""
    yield
    while start._stops:
        start._stops.pop()()
    assert not [t for t in threading.enumerate() if t.name.startswith("graft-start")]


@pytest.fixture
def pool() -> Iterator[Pool]:
    config.publish(config.GraftConfig(enable=True))
    layout, ledger = hr.LAYOUT, PageLedger(PAGES)
    host = HostPool(hr.HOST_PAGES, layout.page_bytes, pin=False)
    tree = UnifiedTree(ledger, page_tokens=layout.page_tokens, policy=Lru())
    tree.host = HostTier(host.ledger, tree.policy)
    prices = Prices(page_bytes=layout.page_bytes, page_tokens=layout.page_tokens)
    arena = Arena(layout, PAGES, "cpu")
    yield Pool(layout=layout, arena=arena, ledger=ledger, tree=tree, host=host, prices=prices)
    config.publish(config.GraftConfig())


def refs(folder: Path, count: int) -> list[LoRARef]:
    for number in range(count):
        hp.save_adapter(folder / f"a{number}", seed=number, r=4 + number)
    return [LoRARef(lora_name=f"a{n}", lora_path=str(folder / f"a{n}")) for n in range(count)]


def starting(manager: Manager, pool: Pool) -> None:
    """What the hooks do, without any capture."""
    manager.bind(pool)
    manager.at_start.finish()


def test_they_are_registered_in_order_whoever_is_read_first(pool: Pool, tmp_path: Path) -> None:
    named = refs(tmp_path, 5)
    manager = Manager(named)
    manager.needs = {"a0": manager.ended["a1"]}
    manager.bind(pool)
    manager.at_start.finish()
    assert manager.at_start.is_finished
    known = manager.residency.known()
    assert [one.adapter_id for one in known] == [ref.lora_id for ref in named]
    assert list(manager.lora_refs) == [ref.lora_id for ref in named]
    assert threading.current_thread().name not in manager.threads
    for one, ref in zip(known, named, strict=True):
        adapter = read_adapter(ref.lora_path, hr.SPEC)
        assert one.node.identity == adapter.identity
        wanted = pack(adapter, manager.residency.tile_map).pages
        assert one.node.host is not None
        rows = torch.stack([pool.host.row(page) for page in one.node.host.pages])
        assert torch.equal(rows, wanted)
    assert manager.tiers.images.store.idle
    manager.residency.check_invariants()
    manager.tiers.check_invariants()


def test_the_first_is_read_while_kernels_compile(pool: Pool, tmp_path: Path) -> None:
    manager = Manager(refs(tmp_path, 1))

    class Compiling(Backend):
        def bind(self, *_: Any) -> None:
            assert manager.ended["a0"].wait(30)
            super().bind()

    manager.lora_backend = Compiling()
    manager.bind(pool)
    assert manager.lora_backend.bound.is_set()
    manager.at_start.finish()
    assert len(manager.residency.known()) == 1


def test_a_bad_folder_ends_the_start_with_its_own_error(pool: Pool, tmp_path: Path) -> None:
    named = refs(tmp_path, 3)
    (tmp_path / "a1" / hp.WEIGHTS).write_bytes(b"nothing")
    (tmp_path / "a2" / hp.WEIGHTS).unlink()
    with pytest.raises(AdapterError) as wanted:
        read_adapter(named[1].lora_path, hr.SPEC)
    manager = Manager(named)
    manager.needs = {"a1": manager.ended["a2"]}
    with pytest.raises(AdapterError) as found:
        starting(manager, pool)
    assert str(found.value) == str(wanted.value)
    assert [one.name for one in manager.residency.known()] == ["a0"]


def test_captures_do_not_wait_for_reads_that_have_not_ended(pool: Pool, tmp_path: Path) -> None:
    manager, go = Manager(refs(tmp_path, 3)), threading.Event()
    manager.needs = {"a1": go}
    manager.bind(pool)
    assert manager.ended["a0"].wait(30)
    runner = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
    start.before_graphs(runner.model_runner)
    start.between_captures(runner, 8)
    manager.at_start.check_invariants()
    assert not manager.at_start.is_finished
    assert "a1" not in [one.name for one in manager.residency.known()]
    go.set()
    manager.at_start.finish()
    assert [one.name for one in manager.residency.known()] == ["a0", "a1", "a2"]
    manager.at_start.check_invariants()
    start.between_captures(runner, 8)  # a capture of later on


def test_a_bad_folder_is_told_between_captures_unless_it_looks_like_theirs(
    pool: Pool, tmp_path: Path
) -> None:
    named = refs(tmp_path, 1)
    error: list[Exception] = [RuntimeError("no memory")]

    class Failing(Manager):
        def read(self, ref: LoRARef, base_weight: BaseWeight | None = None) -> ReadAdapter:
            raise error[0]

    manager = Failing(named)
    manager.bind(pool)
    manager.at_start._reads._pool.shutdown(wait=True)
    manager.at_start.register_ready()
    with pytest.raises(RuntimeError, match="no memory"):
        manager.at_start.finish()


def test_the_hook_finishes_and_stops_whatever_happens(pool: Pool, tmp_path: Path) -> None:
    manager = Manager(refs(tmp_path, 2))
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
    )
    stopped: list[str] = []

    def fails(_: object) -> None:
        manager.bind(pool)
        manager.at_start.gate.close()
        start.stop_at_end(lambda: stopped.append("memory"))
        raise KeyError("a capture")

    interval = sys.getswitchinterval()
    try:
        with pytest.raises(KeyError, match="a capture"):
            start.init_model_worker(fails, scheduler)
        assert stopped == ["memory"]
        assert start._stops == []
    finally:
        sys.setswitchinterval(interval)
