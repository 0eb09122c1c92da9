"""A change counts when it has stayed for two looks, against a model that keeps all looks."""

from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_graft.adapters.catalog import Catalog
from sglang_graft.adapters.folder_scan import Folder

NAMES = ("a", "b", "c")


def folder(name: str, content: int, refusal: str | None = None) -> Folder:
    return Folder(name, Path(name), (("f", 0, content, 0, 0, 0),), refusal)


class Looks(RuleBasedStateMachine):
    """Folders change at will; looks and checks come in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog()
        self.disk: dict[str, Folder] = {}
        self.looks: list[dict[str, Folder]] = [{}]
        self.checked: dict[str, Folder] = {}

    @rule(name=st.sampled_from(NAMES), content=st.integers(0, 2), bad=st.booleans())
    def write(self, name: str, content: int, bad: bool) -> None:
        self.disk[name] = folder(name, content, "its name" if bad else None)

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        self.disk.pop(name, None)

    @rule(name=st.sampled_from(NAMES))
    def first_use(self, name: str) -> None:
        """A request checks a folder without waiting for a look."""
        if name in self.disk:
            self.catalog.settle(self.disk[name], None)
            self.checked[name] = self.disk[name]

    @rule(refuse=st.booleans())
    def look(self, refuse: bool) -> None:
        last = self.looks[-1]
        self.looks.append(dict(self.disk))
        changes = self.catalog.observe(self.disk)
        assert list(changes.changed) == [
            self.disk[name]
            for name in sorted(self.disk)
            if last.get(name) == self.disk[name] != self.checked.get(name)
        ]
        assert list(changes.gone) == sorted(
            name for name in self.checked if name not in self.disk and name not in last
        )
        for found in changes.changed:
            self.catalog.settle(found, "bad weights" if refuse else None)
            self.checked[found.name] = found
        for name in changes.gone:
            self.catalog.drop(name)
            del self.checked[name]

    @invariant()
    def holds(self) -> None:
        self.catalog.check_invariants()
        assert {name for name in NAMES if self.catalog.get(name)} == self.checked.keys()
        for found in self.catalog.usable():
            assert found == self.checked[found.name]
            assert found.refusal is None


TestLooks = Looks.TestCase
TestLooks.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_refused_check_is_not_usable() -> None:
    catalog = Catalog()
    assert catalog.settle(folder("a", 1), "NaN").refusal == "NaN"
    assert catalog.settle(folder("b", 1, "its name"), None).refusal == "its name"
    catalog.settle(folder("c", 1), None)
    assert [found.name for found in catalog.usable()] == ["c"]
