"""Page copies between a host pool and an arena on the CPU, and the host pool itself."""

import threading
from types import SimpleNamespace

import psutil
import pytest
import torch

from sglang_graft.pool import Arena, PageLayout
from sglang_graft.tiers import CpuCopier, HostPool, Reserve, Way
from sglang_graft.tiers.copies import runs
from sglang_graft.tiers.host_pool import default_bytes, pages_for

LAYOUT = PageLayout(layers=1, page_tokens=16, kv_heads=1, head_dim=8, dtype=torch.float32)


def test_neighbouring_pages_are_one_copy() -> None:
    assert runs([(1, 5), (2, 6), (3, 8), (4, 9), (9, 10)]) == [(1, 5, 2), (3, 8, 2), (9, 10, 1)]
    assert runs([]) == []


def test_pages_go_there_and_back() -> None:
    arena, host = Arena(LAYOUT, 6, "cpu"), HostPool(4, LAYOUT.page_bytes, pin=False)
    copier = CpuCopier(arena, host)
    image = torch.randint(0, 256, (3, LAYOUT.page_bytes), dtype=torch.uint8)
    host.write([4, 1, 2], image)
    assert copier.copy(Way.LOAD, [(4, 2), (1, 3), (2, 4)], [], 0).done()
    for row, page in enumerate((2, 3, 4)):
        assert torch.equal(arena.page_view(page), image[row])
    host.buffer.zero_()
    copier.copy(Way.STORE, [(3, 4), (4, 3)], [], 0)
    assert torch.equal(host.row(3), image[2])
    assert torch.equal(host.row(4), image[1])
    assert not arena.page_view(0).any()


def test_the_sink_takes_part_in_no_copy() -> None:
    copier = CpuCopier(Arena(LAYOUT, 3, "cpu"), HostPool(2, LAYOUT.page_bytes, pin=False))
    with pytest.raises(AssertionError, match="page 0 is the sink"):
        copier.copy(Way.LOAD, [(1, 0)], [], 0)


def test_memory_is_page_locked_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, page_bytes, calls = 64, 1 << 20, []

    def register(address: int, size: int, flags: int) -> int:
        resident = psutil.Process().memory_info().rss - before
        calls.append((address, size, flags, resident > 0.9 * size))
        return 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    before = psutil.Process().memory_info().rss
    host = HostPool(pages, page_bytes, pin=True)
    assert calls == [(host.buffer.data_ptr(), pages * page_bytes, 0, True)]


def test_a_pool_beside_the_start_is_locked_by_a_thread_on_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, go = torch.device("cuda", 3), threading.Event()
    calls: list[tuple[str, object]] = []

    def register(address: int, size: int, flags: int) -> int:
        assert go.wait(30)
        calls.append((threading.current_thread().name.partition("_")[0], (address, size)))
        return 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: calls.append(("device", d)))
    host = HostPool.beside(4, 4096, Reserve(1 << 20), device)
    assert host.ledger.total == 4
    with pytest.raises(AssertionError, match="before it is there"):
        host.write([1], torch.ones(1, 4096, dtype=torch.uint8))
    go.set()
    host.wait()
    host.wait()
    assert calls == [("device", device), ("graft-pin", (host.buffer.data_ptr(), 4 * 4096))]
    host.write([1], torch.ones(1, 4096, dtype=torch.uint8))
    assert host.row(1).all()


def test_a_pool_beside_the_start_that_cannot_be_locked_is_refused_when_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    host = HostPool.beside(2, 4096, Reserve(1 << 20), torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"--graft-host-memory-gb: .* \(CUDA error 2\)"):
        host.wait()


def test_memory_that_cannot_be_page_locked_is_refused_with_its_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    with pytest.raises(ValueError, match=r"--graft-host-memory-gb: .* \(CUDA error 2\)"):
        HostPool(2, 4096, pin=True)


def test_an_image_goes_only_to_pages_of_the_pool() -> None:
    host = HostPool(2, 64, pin=False)
    for page in (0, 3):
        with pytest.raises(AssertionError, match=f"host page {page} is outside"):
            host.write([page], torch.zeros(1, 64, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="2 rows for 1 pages"):
        host.write([1], torch.zeros(2, 64, dtype=torch.uint8))


def test_the_default_size_is_a_share_of_free_memory_with_a_cap() -> None:
    assert default_bytes(100, 10**9) == 40
    assert default_bytes(10**9, 100) == 200


def test_a_pool_without_a_page_is_refused_with_its_flag() -> None:
    assert pages_for(100, 30) == 3
    with pytest.raises(ValueError, match=r"--graft-host-memory-gb: wanted .* 30 bytes, got 29"):
        pages_for(29, 30)
    with pytest.raises(ValueError, match="at least 1 page"):
        HostPool(0, 64, pin=False)


def test_a_pool_larger_than_the_machine_is_refused_with_its_flag() -> None:
    with pytest.raises(ValueError, match="--graft-host-memory-gb"):
        HostPool(2**40, 2**20, pin=False)
