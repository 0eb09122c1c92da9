"""The weights file: headers first, then checked matrices in the model's dtype."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from sglang_graft.adapters.bits import Block, all_finite, bits
from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.safetensors_file import read_headers, read_into
from sglang_graft.adapters.torch_file import BIN_NAME, read_tensors

WEIGHTS_NAME = "adapter_model.safetensors"
_MOST_TENSORS = 2**16  # A and B of every linear of the largest models are a few thousand

# Names as safetensors spells them. Scaled 8-bit floats mean nothing without their scales.
_FLOATS = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_FLOAT_NAMES = {dtype: name for name, dtype in _FLOATS.items()}


class WeightsFile(ABC):
    """An open file of named tensors. Valid inside `open_weights` only."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @abstractmethod
    def names(self) -> list[str]:
        """All tensor names."""

    @abstractmethod
    def _header(self, name: str) -> tuple[list[int], str]:
        """Shape and dtype, the latter as safetensors spells it."""

    @abstractmethod
    def _fill(self, name: str, target: torch.Tensor) -> None:
        """Copy the tensor as it is in the file into `target` of its shape and dtype."""

    def shape(self, name: str) -> list[int]:
        """The shape, from the header. Raises AdapterError for an empty or a non-float tensor."""
        shape, dtype = self._header(name)
        if 0 in shape:
            raise AdapterError(
                self.file, name, f"is empty, shape {shape} (saved from a partitioned model?)"
            )
        if dtype not in _FLOATS:
            raise AdapterError(self.file, name, f"wanted one of {sorted(_FLOATS)}, got {dtype}")
        return shape

    def load(self, name: str, dtype: torch.dtype, block: Block | None = None) -> torch.Tensor:
        """The tensor cast once to `dtype`, contiguous, in memory of its own or of `block`.

        Raises AdapterError when a number is NaN or infinite, before or after the cast.
        """
        shape, spelled = self.shape(name), self._header(name)[1]
        make = torch.empty if block is None else block.empty
        matrix = make(shape, dtype=dtype)
        stored = matrix
        if _FLOATS[spelled] is not dtype:
            stored = torch.empty(shape, dtype=_FLOATS[spelled])
        self._fill(name, stored)
        if stored is not matrix:
            matrix.copy_(stored)
        if not all_finite(matrix):
            if all_finite(stored):
                raise AdapterError(self.file, name, f"holds numbers too large for {dtype}")
            raise AdapterError(self.file, name, "holds NaN or infinite numbers")
        return matrix


class _SafetensorsFile(WeightsFile):
    """A safetensors file; of its tensors those are read that are asked for."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        super().__init__(file)
        self._stream = stream
        self._tensors = read_headers(file, stream)

    def names(self) -> list[str]:
        return list(self._tensors)

    def _header(self, name: str) -> tuple[list[int], str]:
        tensor = self._tensors[name]
        return tensor.shape, tensor.dtype

    def _fill(self, name: str, target: torch.Tensor) -> None:
        read_into(self.file, self._stream, name, self._tensors[name], target)


class _TorchFile(WeightsFile):
    """What weights-only loading made of a `.bin` file, all of it in memory."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self._tensors = read_tensors(file)

    def names(self) -> list[str]:
        return list(self._tensors)

    def _header(self, name: str) -> tuple[list[int], str]:
        tensor = self._tensors[name]
        return list(tensor.shape), _FLOAT_NAMES.get(tensor.dtype, str(tensor.dtype))

    def _fill(self, name: str, target: torch.Tensor) -> None:
        np.copyto(bits(target), bits(self._tensors[name]))


@contextmanager
def open_weights(folder: Path) -> Iterator[WeightsFile]:
    """Open the weights of `folder`; AdapterError when they are missing or broken.

    `adapter_model.bin` is looked at only when there is no `adapter_model.safetensors`.
    """
    file, pickled = folder / WEIGHTS_NAME, folder / BIN_NAME
    if not os.path.lexists(file) and os.path.isfile(pickled):
        yield _counted(_TorchFile(pickled))
        return
    if not os.path.isfile(file):
        raise AdapterError(file, "file", f"is missing, and there is no {BIN_NAME} either")
    try:
        stream = file.open("rb", buffering=0)
    except OSError as error:
        raise AdapterError(file, "file", f"cannot be read: {error.strerror}") from error
    with stream:
        yield _counted(_SafetensorsFile(file, stream))


def _counted(weights: WeightsFile) -> WeightsFile:
    count = len(weights.names())
    if count > _MOST_TENSORS:
        raise AdapterError(weights.file, "tensors", f"wanted at most {_MOST_TENSORS}, got {count}")
    return weights
