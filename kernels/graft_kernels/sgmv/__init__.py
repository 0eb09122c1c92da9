"""Segmented LoRA: every row of a batch through the low-rank matrices of its own adapter."""

from graft_kernels.sgmv.api import Group, Side, Slice, Vector, Weights, expand, sgmv, shrink

__all__ = ["Group", "Side", "Slice", "Vector", "Weights", "expand", "sgmv", "shrink"]
