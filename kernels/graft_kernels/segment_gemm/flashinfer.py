"""Segment GEMM by FlashInfer's grouped GEMMs, which CUTLASS implements, on arrays of pointers.

Both take, for each segment: m, n, k (int32 `[n, 3]`), pointers to its rows of x and out and to its
weight (int64), and the strides of all three in numbers (int64). The one for compute capability 9.0
overwrites `out`; the one for 8.0, which serves all other devices, adds to it.
"""

import functools

import torch
from flashinfer.gemm.gemm_base import get_gemm_module, get_gemm_sm90_module
from flashinfer.utils import determine_gemm_backend

FLOAT_WORKSPACE, INT_WORKSPACE = 32 << 20, 1 << 20


@functools.cache
def _workspaces(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Scratch memory that stays put, as captured graphs want it."""
    return (
        torch.empty(FLOAT_WORKSPACE, dtype=torch.uint8, device=device),
        torch.empty(INT_WORKSPACE, dtype=torch.int8, device=device),
    )


def segment_gemm(
    x: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    addresses: torch.Tensor,
    out: torch.Tensor,
    *,
    transposed: bool,
) -> torch.Tensor:
    """See `api.segment_gemm`."""
    if not len(starts):
        return out
    if determine_gemm_backend(x.device) != "sm90":
        _clear(out, starts, counts)
    launch(
        gemm_arguments(x, starts, counts, addresses, out, transposed=transposed), out, transposed
    )
    return out


def launch(arguments: tuple[torch.Tensor, ...], out: torch.Tensor, transposed: bool) -> None:
    """One grouped GEMM of `gemm_arguments`; adds to `out` where the device is not of 9.0."""
    float_workspace, int_workspace = _workspaces(out.device)
    empty = out.new_empty(0)  # tells the dtype
    if determine_gemm_backend(out.device) == "sm90":
        get_gemm_sm90_module().cutlass_segment_gemm_sm90(
            float_workspace, int_workspace, *arguments, out, empty, empty, transposed
        )
    else:
        get_gemm_module().cutlass_segment_gemm(int_workspace, *arguments, out, empty, transposed)


def gemm_arguments(
    x: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    addresses: torch.Tensor,
    out: torch.Tensor,
    *,
    transposed: bool,
) -> tuple[torch.Tensor, ...]:
    """Problem sizes, pointers of x, weight and out, and their strides."""
    inputs, outputs = x.shape[1], out.shape[1]
    sizes = torch.empty(len(starts), 3, dtype=torch.int32, device=x.device)
    sizes[:, 0], sizes[:, 1], sizes[:, 2] = counts, outputs, inputs
    pointers = [
        tensor.data_ptr() + starts * (tensor.stride(0) * tensor.itemsize) for tensor in (x, out)
    ]
    widths = x.stride(0), inputs if transposed else outputs, out.stride(0)
    strides = [torch.full_like(starts, width) for width in widths]
    return (sizes, pointers[0], addresses, pointers[1], *strides)


def _clear(out: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor) -> None:
    """Zero the rows of all segments, without waiting for the device to learn which."""
    rows = torch.arange(len(out), device=out.device)[:, None]
    mine = ((rows >= starts) & (rows < starts + counts)).any(1)
    out.masked_fill_(mine[:, None], 0)
