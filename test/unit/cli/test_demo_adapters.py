"""The committed adapters of the demo: small, of different shapes, and exactly readable."""

import json
from pathlib import Path

import pytest
import torch

from sglang_graft.adapters import ModelSpec, read_adapter
from sglang_graft.cli.base_model import HUB_NAME
from sglang_graft.cli.demo import ADAPTERS, find_adapters

NAMES = (
    "code-assistant",
    "customer-service",
    "legal",
    "marketing-copy",
    "medical-science",
    "report-analysis",
)
# Sizes of SmolLM2-135M as its config.json gives them.
CONFIG = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "num_hidden_layers": 30,
    "tie_word_embeddings": True,
}


def test_the_six_are_there() -> None:
    assert tuple(find_adapters(ADAPTERS)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_small_and_from_no_machine_in_particular(name: str) -> None:
    folder = ADAPTERS / name
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (folder / "adapter_model.safetensors").stat().st_size <= 1_000_000
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == HUB_NAME
    assert not [value for value in config.values() if str(value).startswith(("/", "~"))]


@pytest.mark.parametrize("name", NAMES)
def test_read_exactly(name: str) -> None:
    config = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    adapter = read_adapter(ADAPTERS / name, ModelSpec.llama_like(CONFIG, torch.bfloat16))
    layers = config["layers_to_transform"]
    assert set(adapter.deltas) == {(at, key) for at in layers for key in config["target_modules"]}
    root = 0.5 if config["use_rslora"] else 1.0
    scale = config["lora_alpha"] / config["r"] ** root
    for delta in adapter.deltas.values():
        assert delta.rank == config["r"]
        assert delta.scale == pytest.approx(scale)
        assert bool(delta.b.any()), "an adapter that was never trained"


def test_shapes_differ() -> None:
    configs = [
        json.loads((Path(path) / "adapter_config.json").read_text())
        for path in find_adapters(ADAPTERS).values()
    ]
    assert {config["r"] for config in configs} == {4, 6, 8, 16}
    assert len({tuple(config["target_modules"]) for config in configs}) == 5
