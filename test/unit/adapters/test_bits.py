"""Numbers by their bits: checked against torch's own answers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_graft.adapters.bits import Block, all_finite, bits, transposed

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_numbers_of_two_bytes(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = torch.isfinite(every)
    assert all_finite(every[finite])
    for number in every[~finite].unbind():
        assert not all_finite(number)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_one_bad_number_anywhere_is_found(dtype: torch.dtype, bad: float) -> None:
    limits = torch.finfo(dtype)
    edge = torch.tensor([limits.max, limits.min, limits.tiny, 0.0, -0.0], dtype=dtype)
    assert all_finite(edge)
    # Larger than what is looked at in one piece.
    matrix = torch.zeros(700, 1000, dtype=dtype)
    assert all_finite(matrix)
    for row, column in ((0, 0), (131, 7), (350, 999), (699, 999)):
        matrix[row, column] = bad
        assert not all_finite(matrix)
        assert not all_finite(matrix.t())
        assert not all_finite(matrix[row])
        matrix[row, column] = 0


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    step=st.sampled_from([1, 2]),
)
def test_transposed(rows: int, columns: int, dtype: torch.dtype, step: int) -> None:
    numbers = torch.arange(rows * columns * step, dtype=torch.float64).to(dtype)
    matrix = numbers.view(rows, columns * step)[:, ::step]
    found = transposed(matrix)
    assert found.flags.c_contiguous
    assert torch.equal(torch.from_numpy(found).view(dtype), matrix.t())


def test_bits_share_memory() -> None:
    matrix = torch.zeros(2, 3, dtype=torch.bfloat16)
    bits(matrix)[1, 2] = 0x3F80
    assert matrix.tolist() == [[0, 0, 0], [0, 0, 1]]


def test_a_block_is_room_for_what_it_was_made_for() -> None:
    shapes = [((3, 5), torch.bfloat16), ((7,), torch.float64), ((1, 1), torch.float32)]
    block = Block([30, 56, 4])
    made = [block.empty(shape, dtype) for shape, dtype in shapes]
    for number, (tensor, (shape, dtype)) in enumerate(zip(made, shapes, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in made] == [[0], [1], [2]]
    assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == 1
    with pytest.raises(AssertionError, match="bytes of"):
        block.empty((1,), torch.float16)
