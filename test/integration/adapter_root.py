"""A root of adapter folders, good and bad, for a server to look at."""

import os
import shutil
from pathlib import Path

import tiny_adapters
import torch
from safetensors.torch import save_file


def put(folder: Path, source: Path) -> Path:
    """A copy of an adapter, there all at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = folder.with_name(f".{folder.name}")
    shutil.copytree(source, hidden)
    if folder.exists():
        folder.rename(folder.with_name(f".old-{folder.name}"))
        hidden.rename(folder)
        shutil.rmtree(folder.with_name(f".old-{folder.name}"))
    else:
        hidden.rename(folder)
    return folder


def spoil(folder: Path, source: Path, tensors: dict[str, torch.Tensor]) -> None:
    """An adapter folder with other weights."""
    put(folder, source)
    save_file(tensors, folder / tiny_adapters.WEIGHTS)


def fill(root: Path, outside: Path, adapters: dict[str, Path]) -> Path:
    """Usable: legal, team/sales and alias. What leads out of `root` leads to `outside`."""
    put(root / "legal", adapters["all-r16"])
    put(root / "team/sales", adapters["patterns"])
    put(root / ".hidden", adapters["q-r4"])
    put(root / "bad name", adapters["q-r4"])
    put(root / "default", adapters["q-r4"])
    (root / "notes").mkdir()
    (put(root / "torn", adapters["q-r4"]) / tiny_adapters.WEIGHTS).unlink()
    spoil(root / "embeds", adapters["q-r4"], {"base_model.model.lm_head.weight": torch.ones(4, 4)})
    spoil(root / "huge", adapters["q-r4"], {"x": torch.ones(2**19)})
    secret = put(outside / "secret", adapters["q-r4"])
    (root / "out").symlink_to(secret)
    (root / "alias").symlink_to(root / "legal")
    half = put(root / "half-out", adapters["q-r4"])
    (half / tiny_adapters.WEIGHTS).unlink()
    (half / tiny_adapters.WEIGHTS).symlink_to(secret / tiny_adapters.WEIGHTS)
    pipe = put(root / "pipe", adapters["q-r4"])
    (pipe / tiny_adapters.WEIGHTS).unlink()
    os.mkfifo(pipe / tiny_adapters.WEIGHTS)
    return root
