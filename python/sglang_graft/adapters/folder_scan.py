"""Adapter folders below roots: which there are, and under which names requests find them."""

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_graft.adapters.config import CONFIG_NAME
from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.folder_names import DEEPEST, folder_problem
from sglang_graft.adapters.location import Signature, check_files, resolve_below, signature

MOST_FOLDERS = 100_000
"""Folders that one scan looks into, so that a root of everything ends."""


@dataclass(frozen=True, slots=True)
class Folder:
    """One adapter folder. `name` is its path below the root, `path` where that really is.

    `refusal` says why nothing in it is read: where it lies, its name, or its links.
    """

    name: str
    path: Path
    signature: Signature
    refusal: str | None = None


@dataclass(slots=True)
class Scan:
    """What one look at the roots found. `complete` is False where it stopped at `MOST_FOLDERS`."""

    folders: dict[str, Folder] = field(default_factory=dict)
    complete: bool = True


def find(name: str, roots: Sequence[Path], reserved: Collection[str] = ()) -> Folder | None:
    """The adapter folder that requests call `name`, None when there is none."""
    if folder_problem(name) is not None:
        return None
    places = [root / name for root in roots if _is_adapter(root / name)]
    return _folder(name, places, roots, reserved) if places else None


def scan(roots: Sequence[Path], reserved: Collection[str] = ()) -> Scan:
    """All adapter folders below `roots`, hidden ones left out.

    Links to folders count when they stay below a root; what lies below a link is not looked for.
    Raises OSError when a root cannot be listed: that its adapters are gone is then not known.
    """
    places: dict[str, list[Path]] = {}
    found = Scan()
    left = MOST_FOLDERS
    for root in roots:
        os.scandir(root).close()
        for name in _walk(root, "", 1):
            left -= 1
            if left < 0:
                found.complete = False
                break
            if _is_adapter(root / name):
                places.setdefault(name, []).append(root / name)
    for name, paths in sorted(places.items()):
        found.folders[name] = _folder(name, paths, roots, reserved)
    return found


def _walk(root: Path, below: str, level: int) -> Iterator[str]:
    """Names of all folders, each before those in it."""
    try:
        with os.scandir(root / below) as entries:
            folders = sorted(
                (entry.name, entry.is_symlink())
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir()
            )
    except OSError:
        return  # not ours to read, or gone meanwhile
    for own, is_link in folders:
        name = f"{below}/{own}" if below else own
        yield name
        if level < DEEPEST and not is_link:
            yield from _walk(root, name, level + 1)


def _is_adapter(place: Path) -> bool:
    return os.path.lexists(place / CONFIG_NAME)


def _folder(
    name: str, places: Sequence[Path], roots: Sequence[Path], reserved: Collection[str]
) -> Folder:
    refusal = folder_problem(name, reserved)
    path = places[0]
    try:
        path = resolve_below(path, roots)
        check_files(path, roots)
    except AdapterError as error:
        refusal = refusal or f"{error.item} {error.reason}"
    if len(places) > 1:
        refusal = "folders of this name lie below several roots"
    # Nothing of a refused folder is looked at, so a later change of what a link leads to is none.
    return Folder(name, path, () if refusal else signature(path), refusal)
