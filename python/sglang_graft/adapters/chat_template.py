"""The chat template that an adapter folder brings along, as text.

Trainers save the tokenizer beside the adapter, and with it the template that it was trained with.
Newer ones write `chat_template.jinja`, older ones a key of `tokenizer_config.json`; as in
transformers, the first wins. Nobody renders anything here.
"""

import os
from pathlib import Path
from typing import Any

from sglang_graft.adapters.errors import AdapterError, show
from sglang_graft.adapters.files import read_bytes, read_json_object

TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_NAME = "tokenizer_config.json"
KEY = "chat_template"
DEFAULT = "default"

LARGEST = 2**20
"""Bytes of a template; the longest in use have some 20 KiB."""


def read_chat_template(folder: Path) -> tuple[Path, dict[str, str]] | None:
    """The file, and templates by name with `default` among them; None for a folder without one.

    Raises AdapterError naming the file.
    """
    file = folder / TEMPLATE_NAME
    if os.path.lexists(file):
        return _checked(file, {DEFAULT: _text(file)})
    file = folder / TOKENIZER_NAME
    if not os.path.lexists(file):
        return None
    found = _named(file, read_json_object(file).get(KEY))
    return None if found is None else _checked(file, found)


def _text(file: Path) -> str:
    try:
        return read_bytes(file, LARGEST).decode("utf-8")
    except UnicodeDecodeError as error:
        raise AdapterError(file, "file", f"is not UTF-8: {error.reason}") from error


def _named(file: Path, value: Any) -> dict[str, str] | None:
    """What the key of a tokenizer's config holds: nothing, a text, or several by name."""
    if value is None:
        return None
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = {entry.get("name"): entry.get("template") for entry in entries}
    if not isinstance(value, dict) or not all(
        isinstance(part, str) for pair in value.items() for part in pair
    ):
        raise AdapterError(file, KEY, f"wanted a text, or texts by name, got {show(value)}")
    if DEFAULT not in value:
        names = ", ".join(sorted(value)) or "none"
        raise AdapterError(file, KEY, f"wanted one that is named {DEFAULT!r}, got {names}")
    return value


def _checked(file: Path, templates: dict[str, str]) -> tuple[Path, dict[str, str]]:
    if sum(map(len, templates.values())) > LARGEST:
        raise AdapterError(file, KEY, f"wanted at most {LARGEST} characters")
    return file, templates
