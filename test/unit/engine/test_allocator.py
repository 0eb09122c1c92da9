"""Token ids out of the ledger, against a plain model of a page table."""

import random

import pytest
import torch

from sglang_graft.cache import Lru, Prices, UnifiedTree
from sglang_graft.engine.allocator import ArenaAllocator, Growth
from sglang_graft.engine.pool import Pool
from sglang_graft.pool import Arena, Owner, PageLayout, PageLedger
from sglang_graft.tiers import HostPool

PAGE = 16
LAYOUT = PageLayout(layers=2, page_tokens=PAGE, kv_heads=1, head_dim=16, dtype=torch.float32)


def make(pages: int = 33) -> ArenaAllocator:
    ledger = PageLedger(pages)
    tree = UnifiedTree(ledger, page_tokens=PAGE, policy=Lru())
    pool = Pool(
        layout=LAYOUT,
        arena=Arena(LAYOUT, pages, "cpu"),
        ledger=ledger,
        tree=tree,
        host=HostPool(1, LAYOUT.page_bytes, pin=False),
        prices=Prices(),
    )
    return ArenaAllocator(pool, ledger.total * PAGE, torch.float32, "cpu", None)


def grow(
    allocator: ArenaAllocator, starts: list[int], ends: list[int], pages: list[int | None]
) -> torch.Tensor | None:
    allocator.expect(list(map(Growth, starts, ends, pages)))
    return allocator.alloc(sum(ends) - sum(starts))


def ids_of(pages: list[int], tokens: int) -> list[int]:
    return LAYOUT.dense_ids(pages)[:tokens].tolist()


def test_prompts_from_nothing() -> None:
    allocator = make()
    ids = grow(allocator, [0, 0], [20, 3], [None, None])
    assert ids is not None
    assert allocator.last_rows == [[1, 2], [3]]
    assert ids.tolist() == ids_of([1, 2], 20) + ids_of([3], 3)


def test_a_prompt_goes_on_inside_a_begun_page() -> None:
    allocator = make()
    first = grow(allocator, [0], [20], [None])
    second = grow(allocator, [20], [40], [2])
    assert first is not None
    assert second is not None
    assert allocator.last_rows == [[3]]
    assert torch.cat([first, second]).tolist() == ids_of([1, 2, 3], 40)


def test_a_prompt_stays_inside_a_begun_page() -> None:
    allocator = make()
    assert grow(allocator, [0, 0], [20, 3], [None, None]) is not None
    ids = grow(allocator, [20, 3], [23, 10], [2, 3])
    assert ids is not None
    assert allocator.last_rows == [[], []]
    assert ids.tolist() == ids_of([1, 2], 23)[20:] + ids_of([3], 10)[3:]


def test_a_prompt_goes_on_behind_whole_pages() -> None:
    allocator = make()
    first = grow(allocator, [0], [32], [None])
    second = grow(allocator, [32], [36], [None])
    assert first is not None
    assert second is not None
    assert allocator.last_rows == [[3]]
    assert torch.cat([first, second]).tolist() == ids_of([1, 2, 3], 36)


def test_a_step_takes_a_page_only_at_its_first_token() -> None:
    allocator = make()
    assert grow(allocator, [0, 0], [16, 17], [None, None]) is not None
    step = grow(allocator, [16, 17], [17, 18], [None, 3])
    assert step is not None
    assert allocator.last_rows == [[4], []]
    assert step.tolist() == [4 * LAYOUT.ids_per_page, 3 * LAYOUT.ids_per_page + 1]
    assert step.dtype == torch.int64


def test_more_or_fewer_than_expected_is_a_mistake() -> None:
    allocator = make()
    allocator.expect([Growth(0, 20, None)])
    with pytest.raises(AssertionError, match="expected 20 tokens, asked for 21"):
        allocator.alloc(21)
    with pytest.raises(AssertionError, match="expected 0 tokens, asked for 20"):
        allocator.alloc(20)


def test_no_room_is_none_and_takes_nothing() -> None:
    allocator = make(pages=3)
    assert grow(allocator, [0], [33], [None]) is None
    assert allocator.available_size() == 2 * PAGE
    assert grow(allocator, [0], [32], [None]) is not None
    assert grow(allocator, [32], [33], [None]) is None
    assert allocator.available_size() == 0


def test_free_by_ids_and_the_numbers_that_checks_see() -> None:
    allocator = make(pages=4)
    ids = grow(allocator, [0], [40], [None])
    assert ids is not None
    assert allocator.free_pages.tolist() == []
    allocator.free_segment(ids[32:], start_pos=32)
    assert allocator.free_pages.tolist() == [int(ids[32]) // PAGE]
    assert allocator.release_pages.numel() == 0
    allocator.free(ids[:32])
    assert allocator.available_size() == allocator.size


def test_random_requests_never_share_a_token() -> None:
    random.seed(1)
    allocator = make(pages=200)
    held: list[list[int]] = [[] for _ in range(6)]
    for _ in range(40):
        growth = [random.choice([0, 1, 5, 16, 37]) for _ in held]
        starts = [len(row) for row in held]
        ends = [start + more for start, more in zip(starts, growth, strict=True)]
        pages = [h[-1] // LAYOUT.ids_per_page if len(h) % PAGE else None for h in held]
        ids = grow(allocator, starts, ends, pages)
        if ids is None:
            break
        for row, part in zip(held, ids.split(growth), strict=True):
            row += part.tolist()
        flat = [token for row in held for token in row]
        assert len(set(flat)) == len(flat)
        taken = sum(len({t // LAYOUT.ids_per_page for t in row}) for row in held)
        assert taken == allocator.pool.ledger.count(Owner.KV_RUNNING)
    for row in held:
        runs = [row[i] % LAYOUT.ids_per_page for i in range(len(row))]
        assert runs == [i % PAGE for i in range(len(row))], "token i lies at offset i % page"
