"""Kernels over paged adapter weights: a folder for each, with a plain torch reference."""

__all__: list[str] = []
