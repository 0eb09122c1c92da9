"""The weights file: headers first, then checked matrices in the model's dtype."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sglang_graft.adapters.errors import AdapterError

WEIGHTS_NAME = "adapter_model.safetensors"

# Names as safetensors spells them. Scaled 8-bit floats mean nothing without their scales.
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


class WeightsFile:
    """An open, memory-mapped safetensors file. Valid inside `open_weights` only."""

    def __init__(self, file: Path, handle: Any) -> None:
        self.file = file
        self._handle = handle

    def names(self) -> list[str]:
        """All tensor names."""
        return list(self._handle.keys())

    def shape(self, name: str) -> list[int]:
        """The shape, from the header. Raises AdapterError for an empty or a non-float tensor."""
        header = self._handle.get_slice(name)
        shape = list(header.get_shape())
        if 0 in shape:
            raise AdapterError(
                self.file, name, f"is empty, shape {shape} (saved from a partitioned model?)"
            )
        if header.get_dtype() not in _FLOATS:
            raise AdapterError(
                self.file, name, f"wanted one of {sorted(_FLOATS)}, got {header.get_dtype()}"
            )
        return shape

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor cast once to `dtype`, contiguous, in memory of its own.

        A copy even without a cast, because a mapped file may change or shrink later. Raises
        AdapterError when a number is NaN or infinite, before or after the cast.
        """
        stored: torch.Tensor = self._handle.get_tensor(name)
        matrix = stored.to(dtype, copy=True).contiguous()
        if not torch.isfinite(matrix).all():
            if torch.isfinite(stored).all():
                raise AdapterError(self.file, name, f"holds numbers too large for {dtype}")
            raise AdapterError(self.file, name, "holds NaN or infinite numbers")
        return matrix


@contextmanager
def open_weights(folder: Path) -> Iterator[WeightsFile]:
    """Open `adapter_model.safetensors` of `folder`; AdapterError when it is missing or broken."""
    file = folder / WEIGHTS_NAME
    if not file.is_file():
        raise AdapterError(file, "file", _why_missing(folder))
    try:
        opened = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise AdapterError(file, "file", f"is not a readable safetensors file: {error}") from error
    with opened as handle:
        yield WeightsFile(file, handle)


def _why_missing(folder: Path) -> str:
    others = sorted(path.name for path in folder.glob("*.bin"))
    if others:
        return f"is missing; {others[0]} is not accepted yet, convert it to safetensors"
    return "is missing"
