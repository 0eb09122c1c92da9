"""The served model's own weights, for adapters that depend on them (DoRA, copies of base weights).

Reads SGLang's modules (0.5.17): linears of q, k, v and gate, up are row blocks of one stacked
parameter, and embeddings are padded at the end. Parameters are looked up at each call, since SGLang
may replace them after loading.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.utils import use_intel_amx_backend

from sglang_graft.adapters import BaseWeight, ModelSpec, NoBaseWeight

_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def base_weight_reader(model: torch.nn.Module, spec: ModelSpec) -> BaseWeight:
    """A reader of the weights of `model`; call it before SGLang wraps the linears."""
    linears = dict(_linears(model, spec))
    outside = {
        path.rpartition(".")[2]: module
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, VocabParallelEmbedding)
    }

    def read(layer: int | None, linear: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        if layer is None:
            if linear not in outside:
                raise NoBaseWeight(f"{type(model).__name__} has no {linear}")
            return _plain(outside[linear].weight, linear)[: spec.vocab_size], None
        module, rows = linears[layer, linear]
        weight = _weight(module, linear)[rows]
        # A bias that is not added by the linear itself stays out of what the adapter scales.
        bias = None if module.skip_bias_add else module.bias
        return weight, None if bias is None else bias[rows].detach()

    return read


def _linears(
    model: torch.nn.Module, spec: ModelSpec
) -> Iterator[tuple[tuple[int, str], tuple[Any, slice]]]:
    """(layer, linear) -> module that stacks it, and its rows there."""
    modules = {path: m for path, m in model.named_modules() if isinstance(m, LinearBase)}
    for layer in range(spec.layers):
        for group, members in spec.groups().items():
            parts = (spec.layer_prefix, str(layer), members[0].parent, group)
            module, start = modules[".".join(filter(None, parts))], 0
            for member in members:
                stop = start + member.out_features
                yield (layer, member.name), (module, slice(start, stop))
                start = stop


def _weight(module: Any, linear: str) -> torch.Tensor:
    if not isinstance(module.quant_method, UnquantizedLinearMethod):
        kind = type(module.quant_method).__name__
        raise NoBaseWeight(f"{linear} is quantized ({kind}); serve the unquantized base model")
    if use_intel_amx_backend(module):
        raise NoBaseWeight(f"{linear} is packed for AMX; unset SGLANG_USE_CPU_ENGINE")
    return _plain(module.weight, linear)


def _plain(weight: torch.Tensor, name: str) -> torch.Tensor:
    if weight.dtype not in _PLAIN:
        raise NoBaseWeight(f"{name} is held as {weight.dtype}; serve the unquantized base model")
    return weight.detach()
