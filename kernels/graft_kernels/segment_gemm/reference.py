"""Segment GEMM in plain torch on the host: the oracle of the kernel tests."""

import torch

from graft_kernels import tiles


def segment_gemm(
    x: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    addresses: torch.Tensor,
    out: torch.Tensor,
    *,
    transposed: bool,
    arena: torch.Tensor,
) -> torch.Tensor:
    """See `api.segment_gemm`."""
    inputs, outputs, numbers = x.shape[1], out.shape[1], arena.view(out.dtype)
    shape = (outputs, inputs) if transposed else (inputs, outputs)
    segments = zip(starts.tolist(), counts.tolist(), addresses.tolist(), strict=True)
    for start, count, address in segments:
        assert start in range(len(x) - count + 1), f"rows {start} + {count} of {len(x)}"
        if count:
            weight = tiles.read(numbers, address, inputs * outputs).view(shape)
            weight = weight.to(x.dtype)
            rows = slice(start, start + count)
            out[rows] = (x[rows] @ (weight.T if transposed else weight)).to(out.dtype)
    return out
