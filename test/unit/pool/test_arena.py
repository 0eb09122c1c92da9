"""The arena's views: right bytes, no overlap, page images."""

import pytest
import torch

from sglang_graft.pool import Arena, PageLayout

PAGES = 4


def make_arena(dtype: torch.dtype = torch.float32) -> Arena:
    layout = PageLayout(layers=3, page_tokens=4, kv_heads=2, head_dim=8, dtype=dtype)
    return Arena(layout, PAGES, "cpu")


def views(arena: Arena) -> list[torch.Tensor]:
    """All views in the order of their strips within a page: K0, V0, K1, V1, ..."""
    layers = range(arena.layout.layers)
    return [view(layer) for layer in layers for view in (arena.key_view, arena.value_view)]


def strip(arena: Arena, page: int, index: int) -> torch.Tensor:
    """One strip of a page, `[page_tokens, kv_heads, head_dim]`, cut from the page's bytes."""
    layout = arena.layout
    size = layout.page_tokens * layout.row_bytes
    piece = arena.page_view(page)[index * size : (index + 1) * size]
    return piece.view(layout.dtype).view(layout.page_tokens, layout.kv_heads, layout.head_dim)


def test_memory_starts_as_zeros() -> None:
    arena = make_arena()
    assert arena.buffer.dtype == torch.uint8
    assert arena.buffer.shape == (PAGES * arena.layout.page_bytes,)
    assert not arena.buffer.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_views_are_contiguous_and_share_the_buffer(dtype: torch.dtype) -> None:
    arena = make_arena(dtype)
    end = arena.base_address + arena.buffer.numel()
    for index, view in enumerate(views(arena)):
        assert view.dtype == dtype
        assert view.shape == (arena.layout.rows(PAGES), 2, 8)
        assert view.is_contiguous()
        size = arena.layout.page_tokens * arena.layout.row_bytes
        assert view.data_ptr() == arena.base_address + index * size
        assert view.data_ptr() + view.numel() * view.element_size() <= end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_by_view_then_read_the_page_bytes(dtype: torch.dtype) -> None:
    arena = make_arena(dtype)
    for page in range(PAGES):
        ids = torch.from_numpy(arena.layout.dense_ids([page]))
        for index, view in enumerate(views(arena)):
            tokens = torch.randn(4, 2, 8).to(dtype)
            view[ids] = tokens
            assert torch.equal(strip(arena, page, index), tokens)


def test_write_the_page_bytes_then_read_by_view() -> None:
    arena = make_arena()
    arena.buffer.view(torch.float32).copy_(torch.randn(arena.buffer.numel() // 4))
    for index, view in enumerate(views(arena)):
        for page in (3, 1, 0):
            got = view[torch.from_numpy(arena.layout.dense_ids([page]))]
            assert torch.equal(got, strip(arena, page, index))


def test_no_two_layers_or_pages_overlap_and_no_byte_is_left_out() -> None:
    arena = make_arena()
    ids = torch.from_numpy(arena.layout.dense_ids(range(PAGES)))
    for number, view in enumerate(views(arena), start=1):
        assert not view[ids].any()
        view[ids] = float(number)
    for number, view in enumerate(views(arena), start=1):
        assert (view[ids] == number).all()
    assert (arena.buffer.view(torch.float32) != 0).all()


def test_write_puts_each_image_row_into_its_page() -> None:
    arena = make_arena()
    image = torch.randint(1, 256, (2, arena.layout.page_bytes), dtype=torch.uint8)
    arena.write([3, 1], image)
    assert torch.equal(arena.page_view(3), image[0])
    assert torch.equal(arena.page_view(1), image[1])
    assert not arena.page_view(0).any()
    assert not arena.page_view(2).any()


def test_write_of_nothing() -> None:
    arena = make_arena()
    arena.write([], torch.empty(0, arena.layout.page_bytes, dtype=torch.uint8))
    assert not arena.buffer.any()


@pytest.mark.parametrize("shape", [(1, 768), (2, 767), (1536,)])
def test_an_image_of_the_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    arena = make_arena()
    assert arena.layout.page_bytes == 1536
    with pytest.raises(ValueError, match=r"wanted uint8 \[2, 1536\] for 2 pages, got"):
        arena.write([1, 2], torch.zeros(shape, dtype=torch.uint8))


def test_an_image_of_the_wrong_dtype_is_refused() -> None:
    arena = make_arena()
    with pytest.raises(ValueError, match=r"got torch\.int8"):
        arena.write([1], torch.zeros(1, 1536, dtype=torch.int8))


@pytest.mark.parametrize("page", [-1, 0, PAGES])
def test_no_image_goes_to_the_sink_or_outside(page: int) -> None:
    arena = make_arena()
    with pytest.raises(AssertionError, match=f"page {page} is"):
        arena.write([page], torch.ones(1, 1536, dtype=torch.uint8))
    assert not arena.buffer.any()


@pytest.mark.parametrize("layer", [-1, 3])
def test_an_unknown_layer_is_refused(layer: int) -> None:
    arena = make_arena()
    with pytest.raises(ValueError, match=r"wanted 0\.\.2"):
        arena.key_view(layer)
    with pytest.raises(ValueError, match=r"wanted 0\.\.2"):
        arena.value_view(layer)


def test_too_few_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted at least 2 pages"):
        Arena(make_arena().layout, 1, "cpu")
