"""Where adapter files may lie: below configured roots, after every link is resolved.

A path is somebody's text. Nothing outside the roots is ever looked at, so a refusal does not tell
whether a file exists there; nothing is fetched, so a URL or a hub name is only a wrong path.
"""

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from sglang_graft.adapters.chat_template import TEMPLATE_NAME, TOKENIZER_NAME
from sglang_graft.adapters.config import CONFIG_NAME
from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.torch_file import BIN_NAME
from sglang_graft.adapters.vocabulary import TOKENS_NAME
from sglang_graft.adapters.weights import WEIGHTS_NAME

READ_FILES = (CONFIG_NAME, WEIGHTS_NAME, BIN_NAME, TOKENS_NAME, TEMPLATE_NAME, TOKENIZER_NAME)
"""Every file of an adapter folder that is ever opened."""

Signature = tuple[tuple[str, int, int, int, int, int], ...]
"""(name, device, inode, bytes, mtime ns, ctime ns) of each of `READ_FILES` that is there."""


def resolve_below(path: str | os.PathLike[str], roots: Sequence[Path]) -> Path:
    """The folder `path` with all links resolved. Raises AdapterError unless it is below a root.

    A root itself is no adapter. `roots` may be links; what they point to now is what counts.
    """
    given = Path(path)
    _refuse_text(given)
    absolute = Path(os.path.abspath(given))
    if not any(_is_below(absolute, (root.absolute(), _real(root))) for root in roots):
        raise AdapterError(given, "path", "lies outside of the folders of --graft-adapter-root")
    try:
        resolved = absolute.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise AdapterError(given, "path", "is not a folder") from error
    if not _is_below(resolved, map(_real, roots)):
        raise AdapterError(given, "path", "leads out of --graft-adapter-root by a link")
    if not resolved.is_dir():
        raise AdapterError(given, "path", "is not a folder")
    return resolved


def check_files(folder: Path, roots: Sequence[Path]) -> None:
    """Raise AdapterError when a file that would be read is no plain file below a root."""
    real_roots = [_real(root) for root in roots]
    for name in READ_FILES:
        file = folder / name
        if not os.path.lexists(file):
            continue
        try:
            resolved = file.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise AdapterError(file, "file", "is a link to nothing") from error
        if not _is_below(resolved, real_roots):
            raise AdapterError(file, "file", "leads out of --graft-adapter-root by a link")
        if not resolved.is_file():
            raise AdapterError(file, "file", "is not a regular file")


def check_size(folder: Path, limit: int) -> None:
    """Raise AdapterError when the files that would be read are larger than `limit` bytes."""
    size = file_bytes(folder)
    if size > limit:
        raise AdapterError(
            folder,
            "size",
            f"wanted at most {limit} bytes, got {size}; raise --graft-max-adapter-mb",
        )


def file_bytes(folder: Path) -> int:
    """Bytes of the files that would be read; those that are not there count nothing."""
    return sum(entry[3] for entry in signature(folder))


def signature(folder: Path) -> Signature:
    """What tells one content of `folder` from another without reading it, links followed.

    A changed byte changes it, as long as the file system keeps times; ctime also shows files that
    were moved there with old times.
    """
    found = []
    for name in READ_FILES:
        try:
            at = os.stat(folder / name)
        except OSError:
            continue  # not there, or gone meanwhile: that is a signature too
        if stat.S_ISREG(at.st_mode):
            times = (at.st_mtime_ns, at.st_ctime_ns)
            found.append((name, at.st_dev, at.st_ino, at.st_size, *times))
    return tuple(found)


def _refuse_text(given: Path) -> None:
    text = os.fspath(given)
    if "\0" in text:
        raise AdapterError(given, "path", "has a zero byte in it")
    if ":/" in text:  # Path has made one slash of two
        raise AdapterError(given, "path", "is a URL, wanted a local folder; nothing is fetched")
    if ".." in given.parts:
        raise AdapterError(given, "path", 'wanted a path without ".."')


def _real(root: Path) -> Path:
    return Path(os.path.realpath(root))


def _is_below(path: Path, roots: Iterable[Path]) -> bool:
    return any(root in path.parents for root in roots)
