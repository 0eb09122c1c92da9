"""Small files of an adapter folder."""

import json
import os
from pathlib import Path
from typing import Any

from sglang_graft.adapters.errors import AdapterError

_LARGEST = 16 * 2**20


def read_bytes(file: Path, largest: int = _LARGEST) -> bytes:
    """The content of `file`, at most `largest` bytes. Raises AdapterError naming the file."""
    try:
        # A pipe would block for ever, and a device never ends.
        if os.path.exists(file) and not os.path.isfile(file):
            raise AdapterError(file, "file", "is not a regular file")
        with file.open("rb") as stream:
            content = stream.read(largest + 1)
    except OSError as error:
        raise AdapterError(file, "file", f"cannot be read: {error.strerror}") from error
    if len(content) > largest:
        raise AdapterError(file, "file", f"wanted at most {largest} bytes")
    return content


def read_json_object(file: Path, largest: int = _LARGEST) -> dict[str, Any]:
    """The JSON object in `file` of at most `largest` bytes, keys in file order.

    Raises AdapterError naming the file.
    """
    text = read_bytes(file, largest)
    try:
        # ValueError covers bad JSON, bad UTF-8 and absurdly long numbers.
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterError(file, "file", f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise AdapterError(file, "file", f"wanted a JSON object, got {type(value).__name__}")
    return value
