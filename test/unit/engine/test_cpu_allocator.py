"""The allocator of a CPU server without Graft: built with a page size, as SGLang builds it."""

from typing import Any

import pytest
import torch

from sglang_graft.engine.cpu_allocator import CpuTokenAllocator


def allocator(page_size: int) -> CpuTokenAllocator:
    rest: dict[str, Any] = {"kvcache": None, "need_sort": False}
    return CpuTokenAllocator(8, page_size=page_size, dtype=torch.float32, device="cpu", **rest)


def test_it_hands_out_single_tokens() -> None:
    tokens = allocator(1)
    taken = tokens.alloc(3)
    assert taken is not None
    assert taken.tolist() == [1, 2, 3]
    assert tokens.available_size() == 5


def test_larger_pages_are_refused_with_the_flag() -> None:
    with pytest.raises(ValueError, match=r"--page-size: wanted 1 .* got 16"):
        allocator(16)
