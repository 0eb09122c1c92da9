"""What the integration tests share: the tiny model, its adapters and their reference answers."""

from pathlib import Path

import pytest
import tiny_adapters
import tiny_model
import torch
from reference import Reference


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny base model."""
    return tiny_model.save_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of adapters of every kind, by name."""
    return tiny_adapters.save_all(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="session")
def reference(adapters: dict[str, Path]) -> Reference:
    """Their greedy answers by transformers and PEFT."""
    torch.set_num_threads(1)  # the server runs beside us
    return Reference(tiny_model.new_model(), adapters)
