"""Which folders are adapters, and under which names."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_graft.adapters import folder_scan
from sglang_graft.adapters.folder_names import (
    DEEPEST,
    LONGEST,
    folder_problem,
    given_problem,
)
from sglang_graft.adapters.folder_scan import find, scan
from sglang_graft.adapters.location import READ_FILES


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in READ_FILES[:2]:
        (folder / name).write_text("x")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name in ("legal", "team/legal", "team/sales/v2", ".hidden", "team/.trash", "bad name"):
        make(root / name)
    make(root / "legal/checkpoint-5")
    make(root / "a/b/c/d/e")
    (root / "notes").mkdir()
    (root / "file").write_text("x")
    return root


USABLE = ["legal", "legal/checkpoint-5", "team/legal", "team/sales/v2"]


def test_names_are_paths_below_the_root(root: Path) -> None:
    found = scan([root])
    assert found.complete
    assert sorted(found.folders) == sorted([*USABLE, "bad name"])
    assert [name for name, folder in found.folders.items() if folder.refusal is None] == USABLE
    for name in USABLE:
        assert found.folders[name].path == root.resolve() / name
        assert found.folders[name] == find(name, [root])


@pytest.mark.parametrize(
    "name",
    [
        *("", ".hidden", "bad name", "notes", "file", "nobody", "a/b/c/d/e", "/legal", "legal/"),
        *("../root/legal", "team/../legal", "team//legal", "./legal", "legal\0", "a" * 300, "l*"),
    ],
)
def test_C74_other_names_find_nothing(root: Path, name: str) -> None:
    assert find(name, [root]) is None


def test_a_name_in_two_roots_is_nobodys(root: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other/legal").parent
    make(other / "own")
    roots = [root, other]
    found = scan(roots).folders
    for folder in (found["legal"], find("legal", roots)):
        assert folder is not None
        assert folder.refusal is not None
        assert "several roots" in folder.refusal
    assert found["own"].refusal is None
    assert found["team/legal"].refusal is None


def test_a_name_of_the_base_model_is_refused(root: Path) -> None:
    make(root / "default")
    found = scan([root], reserved={"legal"}).folders
    assert "base model" in str(found["legal"].refusal)
    assert "base model" in str(found["default"].refusal)


def test_links_stay_below_a_root_and_are_not_walked(root: Path, tmp_path: Path) -> None:
    outside = make(tmp_path / "outside/secret")
    (root / "out").symlink_to(outside)
    (root / "up").symlink_to(tmp_path)
    (root / "self").symlink_to(root)
    (root / "latest").symlink_to("team/sales/v2")
    found = scan([root]).folders
    assert found["latest"].path == root.resolve() / "team/sales/v2"
    assert found["latest"].refusal is None
    assert "by a link" in str(found["out"].refusal)
    assert found["out"].signature == ()
    assert not [name for name in found if name.startswith(("up", "self"))]
    through = find("up/outside/secret", [root])
    assert through is not None
    assert "by a link" in str(through.refusal)


def test_a_file_that_leads_out_refuses_its_folder(root: Path) -> None:
    (root / "legal" / READ_FILES[0]).unlink()
    (root / "legal" / READ_FILES[0]).symlink_to("/dev/zero")
    assert "by a link" in str(scan([root]).folders["legal"].refusal)


def test_a_root_that_cannot_be_listed_says_nothing_about_its_adapters(root: Path) -> None:
    with pytest.raises(OSError):
        scan([root, root / "gone"])


def test_a_root_of_everything_ends(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_scan, "MOST_FOLDERS", 3)
    found = scan([root])
    assert not found.complete
    assert len(found.folders) <= 3


def test_a_folder_that_is_not_ours_is_passed_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.scandir

    def scandir(path: Path) -> object:
        if Path(path).name == "team":
            raise PermissionError(13, "not ours")
        return original(path)

    monkeypatch.setattr(folder_scan.os, "scandir", scandir)
    assert list(scan([root]).folders) == ["bad name", "legal", "legal/checkpoint-5"]


@pytest.mark.parametrize(
    "name", ["a", "A-1", "team/legal", "v1.2+x_y", "_x", "a/b/c/d", "a" * LONGEST]
)
def test_names_of_folders(name: str) -> None:
    assert folder_problem(name) is None
    assert given_problem(name) is None


@pytest.mark.parametrize(
    "name",
    [
        *("", ".a", "-a", "+a", "a b", "a:b", "a//b", "/a", "a/", "a/.b", "a\n", "é", "a\u202eb"),
        *("default", "a" * (LONGEST + 1), "/".join("a" * (DEEPEST + 1)), "..", "a/../b", "a\\b"),
    ],
)
def test_names_that_folders_cannot_have(name: str) -> None:
    assert folder_problem(name) is not None


def test_names_given_by_hand_may_be_any_printable_text() -> None:
    for name in ("x:y", "a b", "é", "-a", "a//b"):
        assert given_problem(name) is None
    for name in ("", " a", "a\n", "a\u202eb", "a\0", "default", "base", "a" * (LONGEST + 1)):
        assert given_problem(name, {"base"}) is not None


@given(st.text(alphabet="ab./\\ :\0~-_*é", max_size=12))
def test_a_name_never_leaves_its_root(name: str) -> None:
    if folder_problem(name) is None:
        assert given_problem(name) is None
        path = os.path.normpath(f"/root/{name}")
        assert path == f"/root/{name}"
        assert not any(part.startswith(".") for part in name.split("/"))
