"""In decode graphs, x @ A.T runs beside the base product instead of after it.

Target (0.5.17): `forward` of `ColumnParallelLinearWithLoRA`, `RowParallelLinearWithLoRA` and
`ReplicatedLinearWithLoRA` and of their subclasses (`lora.layers`), by torch's own pre-hooks on each
layer. Reason: these layers multiply with the base weights first and call the LoRA backend
afterwards, but what x @ A.T needs is there before. A graph can run both at once (`DeviceSgmv`).

The hooks are there only while decode graphs are captured. A graph keeps what they did, and in an
eager forward they would do nothing but make torch take the slow way into each layer.

Rows that a row-parallel layer would split among ranks, or copy, are not what the backend gets; such
layers are left alone.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
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


@contextmanager
def early(backend: Any, layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    """While decode graphs are captured: each layer that can begin early does.

    RuntimeError at the end if there are such layers and none of them began.
    """
    with ExitStack() as hooks:
        count, before = 0, backend.begun
        for layer in layers:
            if isinstance(layer, _LAYERS) and getattr(layer.base_layer, "input_is_parallel", True):
                hooks.callback(layer.register_forward_pre_hook(begin).remove)
                count += 1
        yield
    if count and backend.begun == before:
        raise RuntimeError(
            f"{count} LoRA layers were to begin x @ A.T early in decode graphs, and none did:"
            " the layers of this SGLang are not called as in 0.5.17"
        )
