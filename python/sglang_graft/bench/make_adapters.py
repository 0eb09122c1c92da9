"""Random adapters for a workload: seeded, at its ranks, named as it names them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from safetensors.torch import save_file

from sglang_graft.bench.shape import ModelShape
from sglang_graft.sim.workloads import AdapterSpec

_WEIGHTS, _CONFIG, _MARK = "adapter_model.safetensors", "adapter_config.json", "complete.json"
# Large enough to change tokens, small enough that activations of a random model stay in range.
_STD_A, _STD_B = 0.01, 0.01


def make_adapters(
    folder: Path,
    adapters: tuple[AdapterSpec, ...],
    shape: ModelShape,
    *,
    seed: int,
    distinct: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> dict[str, Path]:
    """Write what is missing below `folder`; returns the folder of each name.

    distinct: how many weight files of one rank are written; further adapters are hard links to
    them with a scale (`lora_alpha`) of their own, so that no two adapters are equal as applied,
    and 1000 of them fit on a disk. None: every adapter has its own. `done` is called for each.
    Runs that share the folder wait for each other here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        return _make_all(folder, adapters, shape, seed, distinct, done)


def _make_all(
    folder: Path,
    adapters: tuple[AdapterSpec, ...],
    shape: ModelShape,
    seed: int,
    distinct: int | None,
    done: Callable[[], None],
) -> dict[str, Path]:
    found: dict[str, Path] = {}
    files: dict[int, list[Path]] = {}
    for index, spec in enumerate(adapters):
        own = files.setdefault(spec.rank, [])
        place = len(own)
        home = folder / f"{spec.name}-r{spec.rank}"
        wanted: dict[str, object] = {
            "rank": spec.rank,
            "seed": seed,
            "index": index,
            "distinct": distinct,
        }
        wanted |= {"bytes_per_rank": shape.adapter_bytes_per_rank, "dtype": shape.dtype_name}
        linked = None if distinct is None or place < distinct else own[place % distinct]
        if not _is_complete(home, wanted):
            _clear(home)
            if linked is None:
                save_file(_tensors(shape, spec.rank, seed, index), home / _WEIGHTS)
            else:
                os.link(linked, home / _WEIGHTS)
            alpha = 2 * spec.rank + (0 if linked is None else place // (distinct or 1))
            (home / _CONFIG).write_text(json.dumps(_config(shape, spec.rank, alpha), indent=1))
            (home / _MARK).write_text(json.dumps(wanted))
        own.append(home / _WEIGHTS)
        found[spec.name] = home
        done()
    return found


def _clear(home: Path) -> None:
    """The mark goes first: a run that is cut short leaves nothing that looks whole."""
    home.mkdir(parents=True, exist_ok=True)
    for name in (_MARK, _WEIGHTS):
        (home / name).unlink(missing_ok=True)


def _is_complete(home: Path, wanted: dict[str, object]) -> bool:
    mark = home / _MARK
    return mark.is_file() and json.loads(mark.read_text()) == wanted


def _tensors(shape: ModelShape, rank: int, seed: int, index: int) -> dict[str, torch.Tensor]:
    """A `[rank, in]` and B `[out, rank]` of every linear; drawn at once and cut, which is fast."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.Generator(device).manual_seed(seed * 1_000_003 + index)
    spec = shape.spec
    sizes: dict[str, tuple[int, int]] = {}
    for layer in range(spec.layers):
        for linear in spec.linears:
            path = f"base_model.model.{spec.layer_prefix}.{layer}.{linear.parent}.{linear.name}"
            sizes[f"{path}.lora_A.weight"] = (rank, linear.in_features)
            sizes[f"{path}.lora_B.weight"] = (linear.out_features, rank)
    total = sum(rows * columns for rows, columns in sizes.values())
    drawn = torch.randn(total, generator=source, device=device, dtype=spec.dtype).cpu()
    found, start = {}, 0
    for name, (rows, columns) in sizes.items():
        part = drawn[start : start + rows * columns].view(rows, columns)
        found[name] = part * (_STD_B if "lora_B" in name else _STD_A)
        start += rows * columns
    return found


def _config(shape: ModelShape, rank: int, alpha: int) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [linear.name for linear in shape.spec.linears],
    }
