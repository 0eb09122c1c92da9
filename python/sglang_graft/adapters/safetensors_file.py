"""Tensors of a safetensors file, read without mapping it.

The library maps files, and a mapped file that somebody cuts short (whoever writes it anew does)
kills the process that looks at it. So the library gets the header alone, in a file that nobody else
has, before as many zeros as the file has bytes; the tensors are read from the file itself.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from sglang_graft.adapters.errors import AdapterError

_LENGTH_BYTES = 8
_LONGEST = 100_000_000  # bytes of a header that the library takes


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the file: shape, dtype as safetensors spells it, first byte and end."""

    shape: list[int]
    dtype: str
    start: int
    end: int


def read_headers(file: Path, stream: BinaryIO) -> dict[str, Stored]:
    """Every tensor by name. Raises AdapterError when the file is no safetensors file."""
    try:
        size = os.fstat(stream.fileno()).st_size
        first = stream.read(_LENGTH_BYTES)
        length = int.from_bytes(first, "little")
        header = stream.read(min(length, _LONGEST))
        names = _checked_names(first + header, size)
    except (SafetensorError, OSError) as error:
        raise AdapterError(file, "file", f"is not a readable safetensors file: {error}") from error
    entries = json.loads(header)
    base = _LENGTH_BYTES + length
    return {
        name: Stored(
            entries[name]["shape"],
            entries[name]["dtype"],
            *(base + offset for offset in entries[name]["data_offsets"]),
        )
        for name in names
    }


def _checked_names(start: bytes, size: int) -> list[str]:
    """Names of a file of `size` bytes that begins with `start`; the library checks the header."""
    descriptor = os.memfd_create("graft-header")
    with os.fdopen(descriptor, "wb") as copy:
        copy.write(start)
        copy.flush()
        os.ftruncate(descriptor, size)
        with safe_open(f"/proc/self/fd/{descriptor}", framework="numpy") as handle:
            return list(handle.keys())


def read_into(
    file: Path, stream: BinaryIO, name: str, stored: Stored, target: torch.Tensor
) -> None:
    """Fill the contiguous `target` with the bytes of one tensor.

    Raises AdapterError when the file has become too short meanwhile, or cannot be read.
    """
    room = target.view(-1).view(torch.uint8).numpy().data
    assert len(room) == stored.end - stored.start, f"{name}: {len(room)} bytes for {stored}"
    done = 0
    while done < len(room):
        try:
            count = os.preadv(stream.fileno(), [room[done:]], stored.start + done)
        except OSError as error:
            raise AdapterError(file, name, f"cannot be read: {error.strerror}") from error
        if not count:
            raise AdapterError(file, name, "is cut off: the file was cut short while it was read")
        done += count
