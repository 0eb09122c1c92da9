"""Page arithmetic: sizes, dense ids and the default page size."""

import numpy as np
import pytest
import torch

from sglang_graft.pool import PageLayout, default_page_tokens


def make_layout(**changes: object) -> PageLayout:
    shape = {"layers": 2, "page_tokens": 4, "kv_heads": 3, "head_dim": 8, "dtype": torch.float16}
    return PageLayout(**{**shape, **changes})


def test_sizes() -> None:
    layout = make_layout()
    assert layout.itemsize == 2
    assert layout.row_bytes == 48
    assert layout.ids_per_page == 16
    assert layout.page_bytes == 768
    assert [layout.rows(n) for n in (1, 2, 3)] == [4, 20, 36]


def test_dense_ids_keep_the_order_of_the_pages() -> None:
    ids = make_layout().dense_ids([2, 1])
    assert ids.dtype == np.int64
    assert ids.tolist() == [32, 33, 34, 35, 16, 17, 18, 19]


def test_dense_ids_of_an_array_and_of_nothing() -> None:
    layout = make_layout()
    assert layout.dense_ids(np.array([1], dtype=np.int32)).tolist() == [16, 17, 18, 19]
    assert layout.dense_ids([]).shape == (0,)


def test_dense_ids_do_not_overflow_32_bits() -> None:
    layout = make_layout(layers=64, page_tokens=64)
    assert layout.dense_ids([2**20])[-1] == 2**20 * 2**13 + 63


def test_page_numbers_undo_dense_ids() -> None:
    layout = make_layout()
    pages = [5, 1, 9]
    assert layout.page_numbers(layout.dense_ids(pages)).tolist() == np.repeat(pages, 4).tolist()


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert make_layout().pages_for(tokens) == pages


@pytest.mark.parametrize(("n", "pages"), [(0, 0), (1, 1), (768, 1), (769, 2)])
def test_pages_for_bytes(n: int, pages: int) -> None:
    assert make_layout().pages_for_bytes(n) == pages


@pytest.mark.parametrize("name", ["layers", "page_tokens", "kv_heads", "head_dim"])
def test_an_empty_side_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: wanted at least 1, got 0"):
        make_layout(**{name: 0})


@pytest.mark.parametrize(
    ("layers", "row_bytes", "tokens"),
    [
        pytest.param(32, 2048, 16, id="8B-is-2MiB-at-16"),
        pytest.param(30, 384, 64, id="135M-stays-below"),
        pytest.param(80, 2048, 16, id="70B-is-above-at-16"),
        pytest.param(16, 1024, 64, id="1B-is-2MiB-at-64"),
        pytest.param(32, 1024, 32, id="2MiB-at-32"),
        pytest.param(1, 43690, 32, id="just-nearer-at-32"),
        pytest.param(1, 43691, 16, id="just-nearer-at-16"),
    ],
)
def test_default_page_tokens(layers: int, row_bytes: int, tokens: int) -> None:
    assert default_page_tokens(layers=layers, row_bytes=row_bytes) == tokens
