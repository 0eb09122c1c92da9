"""Token ids out of the ledger, against a plain model of a page table."""

import random

import torch

from sglang_graft.cache import Lru, Prices, UnifiedTree
from sglang_graft.engine.allocator import ArenaAllocator
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


def extend(
    allocator: ArenaAllocator, starts: list[int], ends: list[int], last: list[int]
) -> torch.Tensor | None:
    before, after = torch.tensor(starts), torch.tensor(ends)
    total = int((after - before).sum())
    return allocator.alloc_extend(before, before, after, after, torch.tensor(last), total)


def ids_of(pages: list[int], tokens: int) -> list[int]:
    return LAYOUT.dense_ids(pages)[:tokens].tolist()


def test_extend_from_nothing() -> None:
    allocator = make()
    ids = extend(allocator, [0, 0], [20, 3], [-1, -1])
    assert ids is not None
    assert allocator.last_rows == [[1, 2], [3]]
    assert ids.tolist() == ids_of([1, 2], 20) + ids_of([3], 3)


def test_extend_goes_on_inside_a_begun_page() -> None:
    allocator = make()
    first = extend(allocator, [0], [20], [-1])
    assert first is not None
    second = extend(allocator, [20], [40], [int(first[-1])])
    assert second is not None
    assert allocator.last_rows == [[3]]
    assert torch.cat([first, second]).tolist() == ids_of([1, 2, 3], 40)


def test_extend_goes_on_behind_whole_pages() -> None:
    allocator = make()
    first = extend(allocator, [0], [32], [-1])
    assert first is not None
    second = extend(allocator, [32], [36], [int(first[-1])])
    assert second is not None
    assert allocator.last_rows == [[3]]
    assert torch.cat([first, second]).tolist() == ids_of([1, 2, 3], 36)


def test_decode_takes_a_page_only_at_its_first_token() -> None:
    allocator = make()
    ids = extend(allocator, [0, 0], [16, 17], [-1, -1])
    assert ids is not None
    last = torch.tensor([int(ids[15]), int(ids[-1])], dtype=torch.int32)
    lengths = torch.tensor([17, 18])
    step = allocator.alloc_decode(lengths, lengths, last)
    assert step is not None
    assert allocator.last_rows == [[4], []]
    assert step.tolist() == [4 * LAYOUT.ids_per_page, int(last[1]) + 1]


def test_decode_of_first_tokens_alone_asks_the_device_nothing() -> None:
    allocator = make()
    assert extend(allocator, [0, 0], [16, 32], [-1, -1]) is not None
    lengths, nowhere = torch.tensor([17, 33]), torch.tensor([-7, -7])
    step = allocator.alloc_decode(lengths, lengths, nowhere)
    assert step is not None
    assert allocator.last_rows == [[4], [5]]
    assert step.tolist() == [4 * LAYOUT.ids_per_page, 5 * LAYOUT.ids_per_page]
    assert step.dtype == torch.int64


def test_no_room_is_none_and_takes_nothing() -> None:
    allocator = make(pages=3)
    assert extend(allocator, [0], [33], [-1]) is None
    assert allocator.available_size() == 2 * PAGE
    assert extend(allocator, [0], [32], [-1]) is not None
    lengths = torch.tensor([33])
    assert allocator.alloc_decode(lengths, lengths, torch.tensor([0])) is None
    assert allocator.available_size() == 0


def test_free_by_ids_and_the_numbers_that_checks_see() -> None:
    allocator = make(pages=4)
    ids = extend(allocator, [0], [40], [-1])
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
        ids = extend(allocator, starts, ends, [h[-1] if h else -1 for h in held])
        if ids is None:
            break
        for row, part in zip(held, ids.split(growth), strict=True):
            row += part.tolist()
        flat = [token for row in held for token in row]
        assert len(set(flat)) == len(flat)
        pages = sum(len({t // LAYOUT.ids_per_page for t in row}) for row in held)
        assert pages == allocator.pool.ledger.count(Owner.KV_RUNNING)
    for row in held:
        runs = [row[i] % LAYOUT.ids_per_page for i in range(len(row))]
        assert runs == [i % PAGE for i in range(len(row))], "token i lies at offset i % page"
