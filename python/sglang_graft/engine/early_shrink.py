"""In decode graphs, x @ A.T runs beside the base product instead of after it.

Target (0.5.17): `forward` of `ColumnParallelLinearWithLoRA`, `RowParallelLinearWithLoRA` and
`ReplicatedLinearWithLoRA` and of their subclasses (`lora.layers`), by torch's own pre-hooks on each
layer. Reason: these layers multiply with the base weights first and call the LoRA backend
afterwards, but what x @ A.T needs is there before. A graph can run both at once (`DeviceSgmv`).

Rows that a row-parallel layer would split among ranks, or copy, are not what the backend gets; such
layers are left alone.
"""

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.lora.layers import (
    ColumnParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
)

_LAYERS = (ColumnParallelLinearWithLoRA, RowParallelLinearWithLoRA, ReplicatedLinearWithLoRA)


def begin(layer: Any, inputs: tuple[Any, ...]) -> None:
    """Before `forward` of a LoRA layer."""
    if layer.lora_active:
        qkv = isinstance(layer, QKVParallelLinearWithLoRA)
        layer.lora_backend.begin(inputs[0], layer.B_buffer_qkv if qkv else layer.B_buffer)


def install(layers: Iterable[torch.nn.Module]) -> int:
    """Hook each layer that can begin early; returns how many."""
    count = 0
    for layer in layers:
        if isinstance(layer, _LAYERS) and getattr(layer.base_layer, "input_is_parallel", True):
            layer.register_forward_pre_hook(begin)
            count += 1
    return count


def check(backend: Any, installed: int) -> None:
    """After decode graphs were captured. RuntimeError if none of their layers began early."""
    if installed and not backend.begun:
        raise RuntimeError(
            f"{installed} LoRA layers were to begin x @ A.T early in decode graphs, and none did:"
            " the layers of this SGLang are not called as in 0.5.17"
        )
