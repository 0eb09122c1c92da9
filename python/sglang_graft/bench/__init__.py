"""Measured comparisons: the same workload against stock SGLang and Graft at one budget of bytes."""
