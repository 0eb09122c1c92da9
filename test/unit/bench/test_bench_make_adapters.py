"""Adapters for a workload: whole, seeded, different, and accepted by Graft's own reader."""

import importlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers_bench import save_config
from safetensors.torch import load_file, save_file

from sglang_graft.adapters import Adapter, read_adapter
from sglang_graft.bench.make_adapters import make_adapters
from sglang_graft.bench.shape import ModelShape
from sglang_graft.sim.workloads import AdapterSpec

make_adapters_module = importlib.import_module("sglang_graft.bench.make_adapters")
SPECS = tuple(AdapterSpec(f"adapter-{i}", (4, 8)[i % 2]) for i in range(6))


@pytest.fixture
def shape(tmp_path: Path) -> ModelShape:
    return ModelShape.read(save_config(tmp_path / "model"), "cpu")


def identities(folders: dict[str, Path], shape: ModelShape) -> list[str]:
    return [read(folder, shape).identity for folder in folders.values()]


def written(folders: dict[str, Path]) -> list[int]:
    files = [folder / "adapter_model.safetensors" for folder in folders.values()]
    return [os.stat(file).st_mtime_ns for file in files]


def read(folder: Path, shape: ModelShape) -> Adapter:
    return read_adapter(folder, shape.spec)


def test_every_adapter_is_of_its_rank_and_distinct(shape: ModelShape, tmp_path: Path) -> None:
    made: list[None] = []
    folders = make_adapters(tmp_path, SPECS, shape, seed=1, done=lambda: made.append(None))
    assert list(folders) == [spec.name for spec in SPECS]
    assert len(made) == len(SPECS)
    assert len(set(identities(folders, shape))) == len(SPECS)
    for spec in SPECS:
        tensors = load_file(folders[spec.name] / "adapter_model.safetensors")
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        assert nbytes == spec.rank * shape.adapter_bytes_per_rank
        assert all(tensor.abs().max() > 0 for tensor in tensors.values())


def test_what_is_there_stays_and_the_same_seed_gives_the_same(
    shape: ModelShape, tmp_path: Path
) -> None:
    first = make_adapters(tmp_path / "a", SPECS, shape, seed=1)
    before = [
        os.stat(folder / "adapter_model.safetensors").st_mtime_ns for folder in first.values()
    ]
    again = make_adapters(tmp_path / "a", SPECS, shape, seed=1)
    assert written(again) == before
    other = make_adapters(tmp_path / "b", SPECS, shape, seed=1)
    assert identities(first, shape) == identities(other, shape)
    changed = make_adapters(tmp_path / "a", SPECS, shape, seed=2)
    assert not set(identities(changed, shape)) & set(identities(other, shape))


def test_shared_files_are_links_with_scales_of_their_own(shape: ModelShape, tmp_path: Path) -> None:
    folders = make_adapters(tmp_path, SPECS, shape, seed=1, distinct=1)
    files = {os.stat(f / "adapter_model.safetensors").st_ino for f in folders.values()}
    assert len(files) == 2  # one for each rank
    assert len(set(identities(folders, shape))) == len(SPECS)
    config = json.loads((folders["adapter-4"] / "adapter_config.json").read_text())
    assert config["r"] == 4


def test_a_half_written_adapter_is_written_again(shape: ModelShape, tmp_path: Path) -> None:
    folders = make_adapters(tmp_path, SPECS, shape, seed=1)
    wanted = identities(folders, shape)
    (folders["adapter-2"] / "complete.json").unlink()
    (folders["adapter-2"] / "adapter_model.safetensors").write_bytes(b"half")
    assert identities(make_adapters(tmp_path, SPECS, shape, seed=1), shape) == wanted


def test_runs_at_the_same_time_write_each_adapter_once(
    shape: ModelShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Path] = []

    def save(tensors: dict[str, Any], file: Path) -> None:
        saved.append(file)
        save_file(tensors, file)

    monkeypatch.setattr(make_adapters_module, "save_file", save)

    def run(_: int) -> dict[str, Path]:
        return make_adapters(tmp_path, SPECS, shape, seed=1)

    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(run, range(4))
    assert len(saved) == len(set(saved)) == len(SPECS)
    assert all(other == first for other in others)
    assert len(set(identities(first, shape))) == len(SPECS)
