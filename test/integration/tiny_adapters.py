"""Adapters for the tiny model, written by PEFT: every kind that Graft has to apply exactly."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tiny_model
import torch
from safetensors.torch import load_file, save_file

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

WEIGHTS = "adapter_model.safetensors"
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Name -> (PEFT's LoraConfig, dtype of the file).
KINDS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "q-r4": ({"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}, torch.float32),
    "qv-r8": ({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}, torch.float32),
    "down-r16": ({"r": 16, "lora_alpha": 16, "target_modules": ["down_proj"]}, torch.float32),
    "all-r16": ({"r": 16, "lora_alpha": 16, "target_modules": list(ALL)}, torch.float32),
    "all-r64": ({"r": 64, "lora_alpha": 32, "target_modules": list(ALL)}, torch.float32),
    "odd-r5": (
        {"r": 5, "lora_alpha": 7, "target_modules": ["k_proj", "o_proj", "gate_proj"]},
        torch.float32,
    ),
    "up-r8": ({"r": 8, "lora_alpha": 16, "target_modules": ["up_proj"]}, torch.float32),
    "rslora-r8": (
        {"r": 8, "lora_alpha": 8, "use_rslora": True, "target_modules": ["v_proj", "o_proj"]},
        torch.float32,
    ),
    "patterns": (
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"down_proj": 12, "layers.1.self_attn.q_proj": 3},
            "alpha_pattern": {"v_proj": 20, "layers.0.mlp.down_proj": 6},
        },
        torch.float32,
    ),
    "layer-1": (
        {
            "r": 8,
            "lora_alpha": 24,
            "target_modules": list(ALL),
            "layers_to_transform": [1],
        },
        torch.float32,
    ),
    "fp16": ({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"]}, torch.float16),
    "bf16": ({"r": 8, "lora_alpha": 16, "target_modules": ["k_proj", "v_proj"]}, torch.bfloat16),
    "dora-r8": (
        {"r": 8, "lora_alpha": 16, "use_dora": True, "target_modules": list(ALL)},
        torch.float32,
    ),
    "bias-r6": (
        {"r": 6, "lora_alpha": 9, "lora_bias": True, "target_modules": list(ALL)},
        torch.float32,
    ),
}


@contextmanager
def quiet() -> Iterator[None]:
    """Without PEFT's warnings about `lora_bias`: it cannot be merged, and is a vector."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`lora_bias=True` was passed but")
        warnings.filterwarnings("ignore", r".* tensor\(s\) have invalid shape: .*lora_B\.bias")
        yield


def save(
    folder: Path,
    lora: dict[str, Any],
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    base: Callable[[], torch.nn.Module] = tiny_model.new_model,
) -> Path:
    """Write one adapter whose every number is random, strong enough to change tokens."""
    torch.manual_seed(seed)
    source = torch.Generator().manual_seed(seed)
    with quiet():
        model = peft.get_peft_model(base(), peft.LoraConfig(**lora))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_magnitude_vector" in name:
                    weight.mul_(torch.rand(weight.shape, generator=source) + 0.5)
                elif "lora_" in name:
                    std = 0.5 if "lora_B" in name else 0.1
                    weight.normal_(std=std, generator=source)
        model.save_pretrained(folder)
    if dtype != torch.float32:
        edit_tensors(folder, lambda _, tensor: tensor.to(dtype))
    return folder


def edit_tensors(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Rewrite the weights file with what `change` makes of each tensor."""
    tensors = load_file(folder / WEIGHTS)
    changed = {name: change(name, tensor).contiguous() for name, tensor in tensors.items()}
    save_file(changed, folder / WEIGHTS)


def save_all(folder: Path) -> dict[str, Path]:
    """Every kind, by name."""
    return {
        name: save(folder / name, lora, seed=100 + number, dtype=dtype)
        for number, (name, (lora, dtype)) in enumerate(KINDS.items())
    }


def save_ranks(folder: Path, ranks: dict[str, int]) -> dict[str, Path]:
    """Adapters of given ranks that touch every linear, by name."""
    return {
        name: save(
            folder / name,
            {"r": rank, "lora_alpha": 16, "target_modules": list(ALL)},
            seed=200 + number,
        )
        for number, (name, rank) in enumerate(ranks.items())
    }
