"""Graft: LoRA adapters and every adapter's prefix KV in one GPU memory pool, for SGLang."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("sglang-graft")
except PackageNotFoundError:  # a source tree on PYTHONPATH without installed metadata
    __version__ = "0+source"

SGLANG_VERSION = "0.5.17"
"""The only SGLang release that the hooks in `engine/` were written against."""

__all__ = ["SGLANG_VERSION", "__version__"]
