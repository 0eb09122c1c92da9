"""`adapter_model.bin`: the archive that `torch.save` writes, read without running its pickle.

A pickle is a program. The only thing that ever looks at one is torch's weights-only reader, which
builds tensors and plain containers and calls nothing else; what comes out is checked again.
"""

import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import IO

import torch

from sglang_graft.adapters.errors import AdapterError, show

BIN_NAME = "adapter_model.bin"

# The pickle holds names and shapes only, some 200 bytes for a tensor; the numbers lie beside it.
_LARGEST_PICKLE = 16 * 2**20
# For distinct tensors torch.save goes back only to names that it wrote before: of classes,
# storage types and devices.
_RECALLED = frozenset({"GLOBAL", "BINUNICODE"})
_NAMED_CALL = re.compile(r"GLOBAL ([\w.]+)")


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of `file` by name, on the CPU. Raises AdapterError for anything else in it."""
    try:
        with file.open("rb") as stream:
            size = _check_archive(file, stream)
            stream.seek(0)
            loaded = _load(file, stream)
    except OSError as error:
        raise AdapterError(file, "file", f"cannot be read: {error.strerror}") from error
    # OrderedDict is what a state dict is, and torch's reader makes nothing that derives from it.
    if not isinstance(loaded, dict):
        raise AdapterError(file, "file", f"wanted a dict of tensors, got {type(loaded).__name__}")
    nbytes = sum(_check_tensor(file, name, tensor) for name, tensor in loaded.items())
    if nbytes > size:
        raise AdapterError(
            file, "file", f"wanted at most its own {size} bytes of tensors, got {nbytes}"
        )
    # A tensor may say of its bits that they are to be negated: then it is, here.
    return {name: tensor.detach().resolve_neg() for name, tensor in loaded.items()}


def _check_archive(file: Path, stream: IO[bytes]) -> int:
    """Size of the file in bytes. Nothing in it may become larger by being read."""
    size = stream.seek(0, 2)
    try:
        with zipfile.ZipFile(stream) as archive:
            entries = archive.infolist()
            _check_entries(file, entries, size)
            for entry in entries:
                if entry.filename.endswith(".pkl"):
                    _check_program(file, archive.read(entry))
    except AdapterError:
        raise
    # Besides BadZipFile: what the parsers make of encryption and of nonsense numbers and names.
    except (zipfile.BadZipFile, struct.error, RuntimeError, ValueError, EOFError) as error:
        raise AdapterError(
            file, "file", f"is not an archive of torch.save (torch 1.6 or later): {error}"
        ) from error
    return size


def _check_entries(file: Path, entries: list[zipfile.ZipInfo], size: int) -> None:
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise AdapterError(file, show(entry.filename), "is compressed; torch.save never does")
        if entry.filename.endswith(".pkl") and entry.file_size > _LARGEST_PICKLE:
            raise AdapterError(
                file,
                show(entry.filename),
                f"wanted at most {_LARGEST_PICKLE} bytes, got {entry.file_size}",
            )
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > size:
        raise AdapterError(file, "file", f"claims {unpacked} bytes in a file of {size}")


def _check_program(file: Path, program: bytes) -> None:
    """Refuse a pickle that uses anything but a name twice; reads the program, does not run it.

    A tuple of twice the same tuple, and so on forty times, is a few bytes that take years to hash.
    """
    last, kept = "", {}
    for opcode, argument, _ in pickletools.genops(program):
        if "PUT" in opcode.name or opcode.name == "MEMOIZE":
            kept[argument] = last
        elif "GET" in opcode.name and kept.get(argument) not in _RECALLED:
            raise AdapterError(file, "file", "its pickle uses a value twice (a shared tensor?)")
        last = opcode.name


def _load(file: Path, stream: IO[bytes]) -> object:
    try:
        return torch.load(stream, weights_only=True, map_location="cpu")
    # A stack machine fed with foreign bytes fails in every way there is (IndexError, KeyError,
    # struct.error, RuntimeError, ...), so this one call is caught whole. Its own message is not
    # passed on: it tells people how to switch the protection off.
    except Exception as error:
        called = _NAMED_CALL.search(str(error))
        what = f"it names {called[1]}" if called else "it is damaged or holds more than tensors"
        raise AdapterError(
            file, "file", f"is refused by weights-only loading: {what}; convert it to safetensors"
        ) from error


def _check_tensor(file: Path, name: object, tensor: object) -> int:
    """Bytes of `tensor`, which has to be nothing but numbers under a name."""
    if not isinstance(name, str):
        raise AdapterError(file, show(name), f"wanted a name, got {type(name).__name__}")
    if type(tensor) is not torch.Tensor:
        raise AdapterError(file, name, f"wanted a plain tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise AdapterError(
            file, name, f"wanted a dense tensor, got {tensor.layout} on {tensor.device.type}"
        )
    if vars(tensor):
        raise AdapterError(file, name, f"carries attributes: {show(sorted(vars(tensor)))}")
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes > tensor.untyped_storage().nbytes():
        raise AdapterError(
            file,
            name,
            f"wanted {nbytes} bytes for shape {list(tensor.shape)}, "
            f"got {tensor.untyped_storage().nbytes()}",
        )
    return nbytes
