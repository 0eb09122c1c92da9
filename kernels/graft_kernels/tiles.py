"""Numbers of the arena by their address, on the host: what the references read tiles with."""

import torch


def read(numbers: torch.Tensor, address: int, count: int) -> torch.Tensor:
    """`count` numbers from `address` on, shared; `numbers` is the whole arena in their dtype.

    An address that is not of the arena is a broken invariant.
    """
    base = numbers.data_ptr()
    start, remainder = divmod(address - base, numbers.itemsize)
    # A slice out of range would come back short or from the wrong end, without an error.
    assert start in range(numbers.numel() - count + 1), (
        f"a tile at {address} is outside of the arena at {base}"
    )
    assert not remainder, f"a tile at {address} is not aligned to {numbers.itemsize} bytes"
    return numbers[start : start + count]
