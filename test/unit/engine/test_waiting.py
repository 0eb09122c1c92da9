"""Wishes of the waiting queue, what is promised to running requests, and host memory."""

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_graft.cache import AdapterNode
from sglang_graft.engine import start
from sglang_graft.engine.host_memory import begin_reserve, free_bytes, make_host_pool
from sglang_graft.engine.observe import Observations
from sglang_graft.engine.waiting import WaitingRequests, begin_pass, reserved_pages
from sglang_graft.pool import Arena, PageLayout
from sglang_graft.tiers import Wish

LAYOUT = PageLayout(layers=1, page_tokens=16, kv_heads=1, head_dim=8, dtype=torch.float32)


class Cache:
    """The parts of the tree cache that the waiting queue looks at."""

    keep = True
    is_reading = False

    def __init__(self) -> None:
        self.node = AdapterNode(1, "a", 2)
        self.tiers = self
        self.tenancy = SimpleNamespace(
            enabled=False, share=lambda req: None, choose=lambda queue: queue
        )
        self.seen: list[Wish] = []
        self.pool = SimpleNamespace(ledger=SimpleNamespace(reserve=0))
        self.observed = Observations()
        self.waiting = WaitingRequests(self)  # type: ignore[arg-type]

    def namespace(self, req: Any) -> tuple[AdapterNode, str]:
        return self.node, "salt"

    def step(self, wishes: list[Wish]) -> None:
        self.seen = wishes

    def check_now(self) -> None:
        pass


def request(rid: str, prompt: int, output: int = 0, to_finish: object = None) -> Any:
    return SimpleNamespace(
        rid=rid, origin_input_ids=[7] * prompt, output_ids=[9] * output, to_finish=to_finish
    )


def test_a_wish_is_kept_from_pass_to_pass() -> None:
    cache = Cache()
    req = request("r", 5)
    cache.waiting.step([req])
    first = cache.seen[0]
    assert first.tokens == array("q", [7, 7, 7, 7]), "the last token is computed in any case"
    assert first.salt == "salt"
    cache.waiting.step([req])
    assert cache.seen[0] is first
    req.output_ids = [9, 9]  # it ran, and was retracted
    cache.waiting.step([req])
    assert cache.seen[0].tokens == array("q", [7, 7, 7, 7, 7, 9])
    cache.waiting.step([])
    assert cache.waiting._wishes == {}


def test_requests_that_end_unanswered_wish_for_nothing() -> None:
    cache = Cache()
    cache.waiting.step([request("r", 5, to_finish="an error"), request("s", 5)])
    assert [wish.key for wish in cache.seen] == ["s"]


def test_without_prefix_caching_only_the_adapter_is_wanted() -> None:
    cache = Cache()
    cache.keep = False
    assert len(cache.waiting.wish(request("r", 50)).tokens) == 0


def test_the_reserve_is_a_page_for_each_running_request_and_the_next_chunk() -> None:
    scheduler = SimpleNamespace(chunked_req=None, chunked_prefill_size=100, page_size=16)
    batch = SimpleNamespace(reqs=[1, 2, 3])
    assert reserved_pages(scheduler, batch) == 3
    scheduler.chunked_req = object()
    assert reserved_pages(scheduler, batch) == 3 + 7 + 1


@pytest.mark.parametrize(("running", "full"), [(0, False), (2, True)])
def test_a_full_batch_is_reconsidered_when_nothing_runs(running: int, full: bool) -> None:
    cache = Cache()
    batch = SimpleNamespace(reqs=[1] * running, batch_is_full=True, is_empty=lambda: running == 0)
    scheduler = SimpleNamespace(
        tree_cache=cache, waiting_queue=[], chunked_req=None, device="cpu", page_size=16
    )
    begin_pass(scheduler, None, batch)
    assert batch.batch_is_full is full
    assert cache.pool.ledger.reserve == running


def test_free_memory_is_that_of_the_control_group(tmp_path: Path) -> None:
    machine = free_bytes(tmp_path / "none")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert abs(free_bytes(tmp_path) - machine) < machine
    (tmp_path / "memory.max").write_text("1005\n")
    assert free_bytes(tmp_path) == 1000
    (tmp_path / "memory.current").write_text("2000\n")
    assert free_bytes(tmp_path) == 0


def test_the_size_of_the_host_pool() -> None:
    arena = Arena(LAYOUT, 10, "cpu")
    assert make_host_pool(arena, 0.0).ledger.total == 20, "two pools"
    assert make_host_pool(arena, 5 * LAYOUT.page_bytes / 2**30).ledger.total == 5
    with pytest.raises(ValueError, match=r"--graft-host-memory-gb: wanted at most .* got 999999"):
        make_host_pool(arena, 999999.0)


def test_memory_that_was_begun_early_ends_up_as_large_as_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    fake = SimpleNamespace(cudaHostRegister=lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    arena = Arena(LAYOUT, 10, "cpu")
    begun = begin_reserve(0.0, 3 * arena.buffer.numel())
    assert len(begun.reserve) == 6 * arena.buffer.numel()
    host = make_host_pool(arena, 0.0, begun)
    host.wait()
    assert host.ledger.total == 20, "two pools"
    start._stops.pop()()
    with pytest.raises(ValueError, match=r"--graft-host-memory-gb: wanted at most .* got 999999"):
        begin_reserve(999999.0, 1)
