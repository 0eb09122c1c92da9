"""Grouped matrix products: each run of rows with a matrix of its own, read where it lies."""

from graft_kernels.segment_gemm.api import segment_gemm

__all__ = ["segment_gemm"]
