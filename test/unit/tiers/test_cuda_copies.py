"""Copies on streams beside the forward's; needs a GPU."""

import pytest
import torch

from sglang_graft.pool import Arena, PageLayout
from sglang_graft.tiers import CudaCopier, HostPool, Way

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYOUT = PageLayout(layers=8, page_tokens=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
PAGES = 64


@pytest.fixture(scope="module")
def parts() -> "tuple[Arena, HostPool, CudaCopier, torch.cuda.Stream]":
    arena = Arena(LAYOUT, PAGES, "cuda")
    host = HostPool(PAGES, LAYOUT.page_bytes, pin=True)
    forward = torch.cuda.Stream()
    return arena, host, CudaCopier(arena, host, lambda: forward), forward


def test_the_host_pool_is_pinned_and_no_larger_than_asked(parts) -> None:
    _, host, _, _ = parts
    assert host.buffer.is_pinned()
    assert host.buffer.numel() == PAGES * LAYOUT.page_bytes


def test_pages_go_there_and_back(parts) -> None:
    arena, host, copier, _ = parts
    image = torch.randint(0, 256, (PAGES - 1, LAYOUT.page_bytes), dtype=torch.uint8)
    pages = torch.randperm(PAGES - 1).add(1).tolist()
    host.write(pages, image)
    ticket = copier.copy(Way.LOAD, [(p, p) for p in pages], [], 0)
    torch.cuda.synchronize()
    assert ticket.done()
    for row, page in enumerate(pages):
        assert torch.equal(arena.page_view(page).cpu(), image[row])
    host.buffer.zero_()
    copier.copy(Way.STORE, [(PAGES - p, p) for p in pages], [], 0)
    torch.cuda.synchronize()
    for row, page in enumerate(pages):
        assert torch.equal(host.row(PAGES - page), image[row])


def test_a_load_comes_after_the_forward_that_was_launched_before(parts) -> None:
    arena, host, copier, forward = parts
    host.buffer.fill_(3)
    with torch.cuda.stream(forward):
        torch.cuda._sleep(50_000_000)
        seen = arena.page_view(5).clone()
        arena.page_view(5).fill_(1)
        before = arena.page_view(5).clone()
    ticket = copier.copy(Way.LOAD, [(1, 5)], [], 1)
    assert not ticket.done(), "the call does not wait"
    torch.cuda.synchronize()
    assert int(before[0]) == 1
    assert int(arena.page_view(5)[0]) == 3
    assert seen.numel() == LAYOUT.page_bytes


def test_a_forward_comes_after_the_copies_that_it_was_held_for(parts) -> None:
    arena, host, copier, forward = parts
    arena.buffer.fill_(7)
    torch.cuda.synchronize()
    tickets = [copier.copy(Way.STORE, [(p, p) for p in range(1, PAGES)], [], 0)]
    copier.begin_forward(tickets)
    with torch.cuda.stream(forward):
        arena.buffer.fill_(9)
    torch.cuda.synchronize()
    assert bool((host.buffer[: PAGES - 1] == 7).all())


def test_a_load_comes_after_so_many_forwards_and_no_more(parts) -> None:
    arena, host, _, _ = parts
    forward = torch.cuda.Stream()
    copier = CudaCopier(arena, host, lambda: forward)
    host.buffer.fill_(3)
    copier.begin_forward([])
    with torch.cuda.stream(forward):
        arena.page_view(5).fill_(1)
    copier.begin_forward([])
    with torch.cuda.stream(forward):
        torch.cuda._sleep(200_000_000)  # the second forward is under way for some time
        arena.page_view(6).fill_(1)
        late = torch.cuda.Event()
        late.record(forward)
    early = copier.copy(Way.LOAD, [(1, 5)], [], 1)
    early.event.synchronize()
    assert not late.query(), "the copy did not wait for the second forward"
    behind = copier.copy(Way.LOAD, [(1, 6)], [], 2)
    behind.event.synchronize()
    assert late.query()
    assert int(arena.page_view(5)[0]) == int(arena.page_view(6)[0]) == 3


def test_marks_of_forwards_that_are_over_are_forgotten(parts) -> None:
    arena, host, _, _ = parts
    forward = torch.cuda.Stream()
    copier = CudaCopier(arena, host, lambda: forward)
    for _ in range(10):
        copier.begin_forward([])
    torch.cuda.synchronize()
    copier.copy(Way.LOAD, [(1, 5)], [], 9)
    assert not copier._ends
    torch.cuda.synchronize()
