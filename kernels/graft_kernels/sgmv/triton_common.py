"""What both Triton kernels of segmented LoRA share."""

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
MAX_SLICES = 3
RANK_TILE = 16


@triton.jit
def pick(index, first, second, third):
    """Element `index` of three; Triton has no arrays of scalars."""
    return tl.where(index == 0, first, tl.where(index == 1, second, third))


def three(values: Iterable[int]) -> tuple[int, int, int]:
    """One value for each slice, zero for those that a projection lacks."""
    found = [*values, 0, 0]
    return found[0], found[1], found[2]


def alignment(*values: int) -> int:
    """The largest power of two up to 16 that divides all values."""
    return math.gcd(16, *values)
