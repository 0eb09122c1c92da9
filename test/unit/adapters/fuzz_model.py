"""The base model of the fuzz run, whole for the reader and in parts for PEFT."""

from typing import Any

import peft
import torch

from sglang_graft.adapters import ModelSpec

LAYERS = 2
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
SPEC = ModelSpec.llama_like(SIZES, torch.float32)
MODULES = [f"{linear.parent}.{linear.name}" for linear in SPEC.linears]
PATHS = [f"model.layers.{layer}.{module}" for layer in range(LAYERS) for module in MODULES]
SIZE_OF = {
    f"model.layers.{layer}.{linear.parent}.{linear.name}": (linear.out_features, linear.in_features)
    for layer in range(LAYERS)
    for linear in SPEC.linears
}

_SOURCE = torch.Generator().manual_seed(7)
# Attention has biases, the rest has none.
BASE = {
    path: (
        torch.randn(size, generator=_SOURCE),
        torch.randn(size[0], generator=_SOURCE) if "attn" in path else None,
    )
    for path, size in SIZE_OF.items()
}
INPUTS = {size: torch.randn(2, size, generator=_SOURCE) for size in (8, 12)}


def base_weight(layer: int | None, linear: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The base weights as `read_adapter` asks for them."""
    (path,) = (p for p in BASE if f".{layer}." in p and p.endswith(f".{linear}"))
    return BASE[path]


def peft_model(config: dict[str, Any], paths: list[str]) -> peft.PeftModel:
    """PEFT with LoRA on `paths`, a model of nothing else; ranks and scales as it resolves them."""
    numbers = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
    flags = ("use_dora", "lora_bias")
    chosen = {key: config[key] for key in numbers + flags if config.get(key) is not None}
    targets = "|".join(path.replace(".", r"\.") for path in paths)
    # The start values are all replaced, so none are drawn.
    lora = peft.LoraConfig(target_modules=targets, init_lora_weights=False, **chosen)
    return peft.PeftModel(_skeleton(paths), lora)


def _skeleton(paths: list[str]) -> torch.nn.Module:
    root = torch.nn.Module()
    for path in paths:
        *parents, name = path.split(".")
        module = root
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, torch.nn.Module())
            module = getattr(module, parent)
        module.add_module(name, _linear(path))
    return root


def _linear(path: str) -> torch.nn.Linear:
    weight, bias = BASE[path]
    linear = torch.nn.Linear(*reversed(weight.shape), bias=bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias)
    return linear
