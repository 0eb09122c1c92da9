"""A tiny Llama and PEFT adapters for it, written by PEFT itself, and edits of their files."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

with warnings.catch_warnings():
    # Their imports warn about their own code; in tests a warning is an error.
    warnings.simplefilter("ignore")
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

from sglang_graft.adapters import BaseWeight, ModelSpec

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Tensors = dict[str, torch.Tensor]


def tiny_config() -> LlamaConfig:
    """2 layers, hidden 64, 4 heads of 16 over 2 KV heads, inner 96."""
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )


def tiny_spec(dtype: torch.dtype = torch.float32) -> ModelSpec:
    return ModelSpec.llama_like(tiny_config().to_dict(), dtype)


def save_adapter(
    folder: Path, *, seed: int = 0, attention_bias: bool = False, **lora: Any
) -> peft.PeftModel:
    """Save a random adapter (nothing in it at its start value) and return the PEFT model.

    `attention_bias` gives q, k, v and o of the base model biases, random too.
    """
    torch.manual_seed(seed)
    lora.setdefault("target_modules", ["q_proj", "v_proj"])
    config = tiny_config()
    config.attention_bias = attention_bias
    with _quiet():
        model = peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(**lora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
            elif "lora_magnitude_vector" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif name.endswith(".bias"):
                parameter.normal_(std=0.1)
    with _quiet():
        model.save_pretrained(folder)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without PEFT's warnings about `lora_bias`: it cannot be merged, and is a vector."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`lora_bias=True` was passed but")
        warnings.filterwarnings("ignore", r".* tensor\(s\) have invalid shape: .*lora_B\.bias")
        yield


def lora_layers(model: peft.PeftModel) -> dict[tuple[int, str], Any]:
    """PEFT's own LoRA layers, keyed as `Adapter.deltas` is."""
    found = {}
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight"):
            parts = name.split(".")  # model.layers.<layer>.<parent>.<linear>
            found[int(parts[2]), parts[4]] = module
    return found


def base_weight(model: peft.PeftModel) -> BaseWeight:
    """What an engine would show of the base model that is below `model`."""
    modules = dict(model.base_model.model.named_modules())

    def read(layer: int | None, linear: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        inside = "" if layer is None else f".layers.{layer}."
        (module,) = (
            m for n, m in modules.items() if inside in n and n.rpartition(".")[2] == linear
        )
        module = getattr(module, "base_layer", module)
        return module.weight, getattr(module, "bias", None)

    return read


def edit_config(folder: Path, **changes: Any) -> None:
    keys = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(keys))


def edit_tensors(folder: Path, change: Callable[[Tensors], Tensors | None]) -> None:
    """Rewrite the weights file with what `change` returns, or with what it did in place."""
    tensors = load_file(folder / WEIGHTS)
    changed = change(tensors)
    save_file(tensors if changed is None else changed, folder / WEIGHTS)


def key(layer: int, module: str, side: str) -> str:
    """A PEFT tensor name, such as `key(0, "self_attn.q_proj", "A")`."""
    return f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"
