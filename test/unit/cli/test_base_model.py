"""The cached folder of the base model: found, placed, and never half-made."""

from pathlib import Path
from typing import Any

import pytest

from sglang_graft.cli import base_model


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the conversion by one that writes one file, and collect where it wrote."""
    folders: list[Path] = []

    def write(source: Path, folder: Path, report: Any) -> None:
        report(step="writing")
        folders.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(base_model, "_gguf_path", lambda: Path("model.gguf"))
    monkeypatch.setattr(base_model, "_convert", write)
    return folders


def test_made_once_below_the_cache_folder(tmp_path: Path, convert: list[Path]) -> None:
    made = base_model.ensure_base_model(tmp_path)
    assert made == tmp_path / "models" / "SmolLM2-135M-Instruct"
    assert [path.name for path in made.iterdir()] == ["config.json"]
    assert base_model.ensure_base_model(tmp_path) == made
    assert len(convert) == 1
    assert list(made.parent.iterdir()) == [made]


def test_the_environment_moves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path))
    assert base_model.default_cache_dir() == tmp_path


def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, convert: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, folder: Path, report: Any) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(base_model, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        base_model.ensure_base_model(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_whoever_comes_second_keeps_the_first_folder(
    tmp_path: Path, convert: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "models" / base_model.MODEL_NAME

    def slow(source: Path, folder: Path, report: Any) -> None:
        target.mkdir()  # another process finishes first
        (target / "first").touch()

    monkeypatch.setattr(base_model, "_convert", slow)
    assert base_model.ensure_base_model(tmp_path) == target
    assert [path.name for path in target.iterdir()] == ["first"]
    assert list(target.parent.iterdir()) == [target]


def test_without_the_package_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_model, "_PACKAGE", "no_such_package_of_models")
    with pytest.raises(ValueError, match="scripts/setup"):
        base_model.ensure_base_model(tmp_path)
