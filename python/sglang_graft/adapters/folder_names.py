"""Names that adapters may have.

A folder's name goes into URLs, logs and metrics and is what clients type, so it is plain ASCII.
Names that an operator gives by hand may be any printable text.
"""

import re
from collections.abc import Collection

LONGEST = 128
DEEPEST = 4
"""Levels of folders below a root."""

# What clients send as `model` when they do not care; SGLang accepts any text there.
ANY_MODEL = ("", "default")

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")


def folder_problem(name: str, reserved: Collection[str] = ()) -> str | None:
    """Why the relative path `name` (with `/`) cannot be an adapter's name, or None."""
    if len(name) > LONGEST:
        return f"its name is longer than {LONGEST} characters"
    parts = name.split("/")
    if len(parts) > DEEPEST:
        return f"it lies more than {DEEPEST} levels below the root"
    if not all(map(_PART.fullmatch, parts)):
        return (
            "its name has other characters than letters, digits and . _ + - (first one: no . + -)"
        )
    return _taken(name, reserved)


def given_problem(name: str, reserved: Collection[str] = ()) -> str | None:
    """Why `name`, given by hand, cannot be an adapter's name, or None."""
    if (taken := _taken(name, reserved)) is not None:
        return taken
    if not 1 <= len(name) <= LONGEST:
        return f"wanted a name of 1 to {LONGEST} characters, got {len(name)}"
    if not name.isprintable() or name != name.strip():
        return f"wanted printable characters without spaces around them, got {name!r}"
    return None


def without_base(model: str, base_names: Collection[str]) -> str:
    """What a `model` field names: `NAME` of `BASE:NAME`, and the whole field of any other.

    BASE is one of the base model's own names, not just any text before a colon: `x:y` would
    otherwise be answered by `y` as soon as an adapter `x:y` is unloaded.
    """
    for base in sorted({*base_names, *ANY_MODEL}, key=len, reverse=True):
        if model.startswith(f"{base}:"):
            return model[len(base) + 1 :].strip()
    return model


def _taken(name: str, reserved: Collection[str]) -> str | None:
    if name in reserved or name in ANY_MODEL:
        return f"requests that name {name!r} mean the base model"
    if (rest := without_base(name, reserved)) != name:
        return f"requests that name {name!r} mean an adapter {rest!r} of the base model"
    return None
