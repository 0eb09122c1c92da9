"""Float matrices as the integers of their bits, for numpy.

numpy has no bfloat16. On bits it copies, transposes and checks several times faster than torch
does on floats, in the calling thread alone, and with Python's lock let go.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bits = npt.NDArray[np.signedinteger[Any]]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Of a block that is transposed: it is read and written once in the smallest cache.
_BLOCK_BYTES = 1 << 15
_ALIGNMENT = 64  # a cache line


def bits(tensor: torch.Tensor) -> Bits:
    """A CPU tensor of any strides as signed integers of its size. Shares memory."""
    found: Bits = tensor.detach().view(_INTEGERS[tensor.itemsize]).numpy()
    return found


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no number of a float tensor is NaN or infinite."""
    # Without their sign, the bits of infinity are above those of all numbers, and NaN's not below.
    limit = _infinity(tensor.dtype)
    without_sign = (1 << (8 * tensor.itemsize - 1)) - 1
    return all(
        int((block & without_sign).max()) < limit for block in _row_blocks(bits(tensor), 1 << 18)
    )


@cache
def _infinity(dtype: torch.dtype) -> int:
    return int(bits(torch.tensor(torch.inf, dtype=dtype)))


def transposed(matrix: torch.Tensor) -> Bits:
    """The bits of `matrix` `[m, n]` as `[n, m]`, contiguous, in memory of their own."""
    source = bits(matrix)
    target = np.empty(source.shape[::-1], dtype=source.dtype)
    start = 0
    for block in _row_blocks(source, _BLOCK_BYTES):
        stop = start + len(block)
        target[:, start:stop] = block.T
        start = stop
    return target


class Block:
    """One piece of memory for tensors that come and go together.

    It goes back to the system as a whole. Many small pieces, freed in another thread, would stay
    with the process: as many as the largest adapter of each thread that ever read one.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        """`sizes` are the bytes of the tensors that there is room for."""
        # numpy asks the system for huge pages, torch does not.
        self._room = torch.from_numpy(np.empty(sum(map(_aligned, sizes)), dtype=np.uint8))
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that holds whatever the memory held."""
        nbytes = math.prod(shape) * dtype.itemsize
        start, self._used = self._used, self._used + _aligned(nbytes)
        assert self._used <= len(self._room), f"{self._used} bytes of {len(self._room)}"
        return self._room[start : start + nbytes].view(dtype).view(*shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _row_blocks(source: Bits, nbytes: int) -> Iterator[Bits]:
    """The rows of `source`, some `nbytes` at a time; a scalar and a vector are one block."""
    if source.ndim < 2:
        yield source
        return
    rows = max(1, nbytes * len(source) // max(source.nbytes, 1))
    for start in range(0, len(source), rows):
        yield source[start : start + rows]
