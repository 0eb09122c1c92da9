"""What is known of the folders below the adapter roots, from one look to the next.

A folder that somebody is writing is not to be read. So a change counts once two looks in a row
have seen the same, and a folder is gone once two looks in a row have not seen it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sglang_graft.adapters.folder_scan import Folder


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder as it was when it was checked, and why it cannot be used, if so."""

    folder: Folder
    refusal: str | None


@dataclass(frozen=True, slots=True)
class Changes:
    """What a look has settled: folders that were not checked in this state, names that are gone."""

    changed: tuple[Folder, ...] = ()
    gone: tuple[str, ...] = ()


class Catalog:
    """Adapter folders by name. Checks and clocks are the caller's."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._last: Mapping[str, Folder] = {}

    def observe(self, folders: Mapping[str, Folder]) -> Changes:
        """Take in one look at the roots; the caller answers each change by `settle` or `drop`."""
        last, self._last = self._last, dict(folders)
        changed = tuple(
            folder
            for name, folder in sorted(folders.items())
            if last.get(name) == folder and not self.is_checked(folder)
        )
        gone = tuple(sorted(self._entries.keys() - folders.keys() - last.keys()))
        return Changes(changed, gone)

    def is_checked(self, folder: Folder) -> bool:
        """Whether `folder` was checked with exactly this content."""
        entry = self._entries.get(folder.name)
        return entry is not None and entry.folder == folder

    def settle(self, folder: Folder, refusal: str | None) -> Entry:
        """Keep what a check of `folder` said: None, or why it cannot be used."""
        entry = Entry(folder, folder.refusal or refusal)
        self._entries[folder.name] = entry
        return entry

    def drop(self, name: str) -> None:
        """Forget a folder that is gone."""
        self._entries.pop(name, None)

    def get(self, name: str) -> Entry | None:
        """The entry of `name`, None while it was not checked."""
        return self._entries.get(name)

    def usable(self) -> Iterator[Folder]:
        """Folders that passed their check, by name."""
        for _, entry in sorted(self._entries.items()):
            if entry.refusal is None:
                yield entry.folder

    def check_invariants(self) -> None:
        """Assert that entries stand under their own names and none hides its refusal."""
        for name, entry in self._entries.items():
            assert entry.folder.name == name, f"{entry.folder.name} stands under {name}"
            hidden = entry.folder.refusal is not None and entry.refusal is None
            assert not hidden, f"{name}: refused for {entry.folder.refusal}, listed as usable"
