"""Small JSON files of an adapter folder."""

import json
from pathlib import Path
from typing import Any

from sglang_graft.adapters.errors import AdapterError


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, keys in file order. Raises AdapterError naming the file."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise AdapterError(file, "file", f"cannot be read: {error.strerror}") from error
    try:
        # ValueError covers bad JSON, bad UTF-8 and absurdly long numbers.
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterError(file, "file", f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise AdapterError(file, "file", f"wanted a JSON object, got {type(value).__name__}")
    return value
