"""Paths that clients name: below a root after all links, or refused without a look (C74)."""

import os
from pathlib import Path

import pytest

from sglang_graft.adapters import AdapterError
from sglang_graft.adapters.location import (
    READ_FILES,
    check_files,
    check_size,
    resolve_below,
    signature,
)

CONFIG, WEIGHTS = READ_FILES[:2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """root/legal and root/team/sales, beside outside/legal, and links of every kind."""
    for folder in ("root/legal", "root/team/sales", "outside/legal", "root-2/legal"):
        (tmp_path / folder).mkdir(parents=True)
        for name in (CONFIG, WEIGHTS):
            (tmp_path / folder / name).write_text("x")
    root = tmp_path / "root"
    (root / "inside").symlink_to("team/sales")
    (root / "out").symlink_to("../outside/legal")
    (root / "team/up").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to("loop")
    (root / "gone").symlink_to("nobody")
    os.mkfifo(root / "pipe")
    (tmp_path / "way-in").symlink_to(root)
    return root


@pytest.mark.parametrize("path", ["legal", "team/sales", "./legal", "legal/", "team", "inside"])
def test_C74_what_lies_below_a_root_is_found(root: Path, path: str) -> None:
    wanted = root.resolve() / ("team/sales" if path == "inside" else path)
    assert resolve_below(f"{root}/{path}", [root]) == wanted
    assert resolve_below(f"{root}/{path}", [root.parent / "root-2", root]) == wanted


HOSTILE = {
    "../../etc": '".."',
    "/etc": "outside",
    "/dev/zero": "outside",
    "/": "outside",
    "": "outside",
    "~": "outside",
    "legal": "outside",
    "org/hub-name": "outside",
    "file:///etc": "URL",
    "file://ROOT/legal": "URL",
    "https://example.com/a": "URL",
    "hf://org/name": "URL",
    "ROOT": "outside",
    "ROOT/../root/legal": '".."',
    "ROOT/legal/..": '".."',
    "ROOT/../outside/legal": '".."',
    "ROOT-2/legal": "outside",
    "ROOT/out": "by a link",
    "ROOT/team/up/legal": "by a link",
    "ROOT/loop": "is not a folder",
    "ROOT/gone": "is not a folder",
    "ROOT/pipe": "is not a folder",
    "ROOT/nobody": "is not a folder",
    "ROOT/legal/adapter_config.json": "is not a folder",
    "ROOT/legal\0": "zero byte",
    "ROOT/" + "a" * 5000: "is not a folder",
    "ROOT/../way-in/legal": '".."',
    "BESIDE/way-in/legal": "outside",
}


@pytest.mark.parametrize("path", HOSTILE)
def test_C74_hostile_paths_are_refused_with_the_reason(root: Path, path: str) -> None:
    text = path.replace("ROOT", str(root)).replace("BESIDE", str(root.parent))
    with pytest.raises(AdapterError) as caught:
        resolve_below(text, [root])
    assert HOSTILE[path] in caught.value.reason
    assert caught.value.item == "path"


def test_C74_outside_nothing_is_looked_at(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", None)
    monkeypatch.setattr(Path, "resolve", None)
    for path in ("/etc", "/no/such/folder"):
        with pytest.raises(AdapterError, match="outside"):
            resolve_below(path, [root])


def test_a_root_may_be_a_link(root: Path) -> None:
    link = root.parent / "way-in"
    assert resolve_below(link / "legal", [link]) == root.resolve() / "legal"
    assert resolve_below(root / "legal", [link]) == root.resolve() / "legal"


def make_link_out(file: Path, root: Path) -> None:
    file.symlink_to(root.parent / "outside/legal" / CONFIG)


def make_pipe(file: Path, root: Path) -> None:
    os.mkfifo(file)


def make_device(file: Path, root: Path) -> None:
    file.symlink_to("/dev/zero")


def make_dangling(file: Path, root: Path) -> None:
    file.symlink_to("nobody")


def make_folder(file: Path, root: Path) -> None:
    file.mkdir()


@pytest.mark.parametrize("name", READ_FILES)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (make_link_out, "by a link"),
        (make_device, "by a link"),
        (make_pipe, "not a regular file"),
        (make_folder, "not a regular file"),
        (make_dangling, "to nothing"),
    ],
)
def test_C74_files_inside_a_folder_may_not_lead_out(
    root: Path, name: str, make: object, reason: str
) -> None:
    file = root / "legal" / name
    file.unlink(missing_ok=True)
    make(file, root)  # type: ignore[operator]
    with pytest.raises(AdapterError, match=reason) as caught:
        check_files(root / "legal", [root])
    assert caught.value.file == file


def test_links_between_folders_below_a_root_are_fine(root: Path) -> None:
    (root / "legal" / WEIGHTS).unlink()
    (root / "legal" / WEIGHTS).symlink_to(root / "team/sales" / WEIGHTS)
    check_files(root / "legal", [root])


def test_size_counts_what_would_be_read_through_links(root: Path) -> None:
    (root / "legal" / WEIGHTS).write_bytes(bytes(1000))
    (root / "legal/optimizer.pt").write_bytes(bytes(5000))
    check_size(root / "legal", 1001)
    with pytest.raises(AdapterError, match=r"wanted at most 1000 bytes, got 1001.*max-adapter-mb"):
        check_size(root / "legal", 1000)


def test_a_signature_tells_every_change_apart(root: Path) -> None:
    folder = root / "legal"
    seen = [signature(folder)]
    assert signature(folder) == seen[0]

    def changed() -> bool:
        seen.append(signature(folder))
        return len(set(seen)) == len(seen)

    file = folder / WEIGHTS
    file.write_text("longer")
    assert changed()
    at = file.stat()
    file.write_text("LONGER")  # same size, and the old time put back
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert changed()
    other = folder / "other"
    other.write_text("LONGER")
    os.utime(other, ns=(at.st_atime_ns, at.st_mtime_ns))
    other.rename(file)
    assert changed()
    file.unlink()
    assert changed()
    (folder / "README.md").write_text("not an adapter's business")
    assert signature(folder) == seen[-1]
