"""What a segment GEMM computes, and the checks of its input.

    out[rows of segment i] = x[rows of segment i] @ W_i        W_i stored [K, N]
    out[rows of segment i] = x[rows of segment i] @ W_i.T      W_i stored [N, K], transposed

Rows of segment i are `starts[i]` to `starts[i] + counts[i]`; W_i is row-major at `addresses[i]`.
An A tile of a pool, `[r, K]`, is used transposed; a B tile, `[r, N]`, as it is.
"""

import torch

WIDTH_MULTIPLE = 8
"""16 bytes of a 16-bit type, which CUTLASS loads at a time."""


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
    """Products of `x` `[T, K]` into `out` `[T, N]`; returns `out`.

    `starts`, `counts` and `addresses` are int64 `[n]`, on the device of `x`; addresses point into
    `arena` (uint8) and are multiples of 16. Segments do not overlap and may be empty; rows in none
    keep their bits. On CUDA (float16 and bfloat16) FlashInfer computes, sums are float32, and
    nothing waits for the device. On CPU the weights have the dtype of `out`, and sums that of `x`.
    ValueError where shapes, dtypes or alignment are not so.
    """
    _check(x, starts, counts, addresses, out, arena)
    if x.is_cuda:
        from graft_kernels.segment_gemm import flashinfer

        _check_aligned(x, out)
        return flashinfer.segment_gemm(x, starts, counts, addresses, out, transposed=transposed)
    from graft_kernels.segment_gemm import reference

    return reference.segment_gemm(
        x, starts, counts, addresses, out, transposed=transposed, arena=arena
    )


def _check(
    x: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    addresses: torch.Tensor,
    out: torch.Tensor,
    arena: torch.Tensor,
) -> None:
    for name, matrix in (("x", x), ("out", out)):
        if matrix.dim() != 2 or not matrix.is_floating_point() or matrix.stride(1) != 1:
            raise ValueError(
                f"{name}: wanted a floating-point matrix of adjoining columns, got {matrix.dtype} "
                f"{list(matrix.shape)} of strides {list(matrix.stride())}"
            )
    if len(x) != len(out):
        raise ValueError(f"out: wanted [{len(x)}, N], got {list(out.shape)}")
    lists = {"starts": starts, "counts": counts, "addresses": addresses}
    for name, values in lists.items():
        if values.dtype != torch.int64 or values.shape != (len(starts),):
            raise ValueError(
                f"{name}: wanted torch.int64 [{len(starts)}], got {values.dtype} "
                f"{list(values.shape)}"
            )
    if arena.dtype != torch.uint8 or arena.dim() != 1:
        raise ValueError(f"arena: wanted torch.uint8 [bytes], got {arena.dtype} {arena.dim()}-D")
    for name, tensor in {**lists, "out": out, "arena": arena}.items():
        if tensor.device != x.device:
            raise ValueError(f"{name}: wanted it on {x.device}, got {tensor.device}")


def _check_aligned(x: torch.Tensor, out: torch.Tensor) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16) or out.dtype != x.dtype:
        raise ValueError(
            f"x and out: wanted both torch.float16 or both torch.bfloat16 on CUDA, got {x.dtype} "
            f"and {out.dtype}"
        )
    for name, matrix in (("x", x), ("out", out)):
        lengths = matrix.shape[1], matrix.stride(0)
        start = matrix.data_ptr() // matrix.itemsize
        if any(number % WIDTH_MULTIPLE for number in (*lengths, start)):
            raise ValueError(
                f"{name}: wanted a width, a row stride and a start in multiples of "
                f"{WIDTH_MULTIPLE} numbers, got {lengths[0]}, {lengths[1]} and {start}"
            )
