"""Which linears of a loaded SGLang model adapters may touch, read off its modules (0.5.17).

SGLang stacks q, k, v and gate, up into one projection each; checkpoints and adapters name them
apart. All layers must be alike, as in every dense Llama-shaped model.
"""

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

from sglang_graft.adapters import LinearSpec, ModelSpec

SERVED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_MEMBERS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def _linears(name: str, parent: str, module: Any) -> list[LinearSpec]:
    """The linears that `module` stacks, in its own order."""
    if isinstance(module, QKVParallelLinear):
        query, key_value = module.q_proj_shard_size, module.kv_proj_shard_size
        sizes = [query, key_value, key_value]
    elif isinstance(module, MergedColumnParallelLinear):
        sizes = list(module.output_partition_sizes)
    else:
        assert isinstance(module, RowParallelLinear), f"{name} is a {type(module).__name__}"
        sizes = [module.output_size]
    members = _MEMBERS.get(name, (name,))
    assert len(members) == len(sizes), f"{name} stacks {len(sizes)} linears, wanted {members}"
    return [
        LinearSpec(member, parent, name, module.input_size, size)
        for member, size in zip(members, sizes, strict=True)
    ]


def _by_layer(model: torch.nn.Module) -> tuple[str, dict[int, dict[str, tuple[str, Any]]]]:
    """Layer prefix, and for each layer the linears by their own name: (parent, module)."""
    prefixes: set[str] = set()
    layers: dict[int, dict[str, tuple[str, Any]]] = {}
    for path, module in model.named_modules():
        prefix, found, rest = path.partition(".layers.")
        parts = rest.split(".")
        if not found or not isinstance(module, LinearBase) or not parts[0].isdigit():
            continue
        prefixes.add(prefix + ".layers")
        layers.setdefault(int(parts[0]), {})[parts[-1]] = (".".join(parts[1:-1]), module)
    if len(prefixes) != 1:
        raise ValueError(
            f"--enable-graft: wanted one stack of decoder layers, got {sorted(prefixes)} in"
            f" {type(model).__name__}; start this model without --enable-graft"
        )
    return prefixes.pop(), layers


def model_spec(
    model: torch.nn.Module, allowed: Iterable[str], dtype: torch.dtype, vocab_size: int
) -> ModelSpec:
    """The ModelSpec of a loaded model; `allowed` are --lora-target-modules ("all": every one).

    ValueError when the model is not a stack of equal layers with the four served projections.
    """
    prefix, layers = _by_layer(model)
    wanted = set(allowed)
    specs = []
    for number in sorted(layers):
        modules = layers[number]
        missing = [name for name in SERVED if name not in modules]
        if missing:
            raise ValueError(
                f"--enable-graft: {type(model).__name__} layer {number} has no"
                f" {', '.join(missing)}; got {', '.join(sorted(modules))}. Only dense"
                " Llama-shaped models are served so far; start this one without --enable-graft"
            )
        rows = [spec for name in SERVED for spec in _linears(name, *modules[name])]
        keep = {row.group for row in rows if wanted & {"all", row.name, row.group}}
        specs.append(tuple(row for row in rows if row.group in keep))
    assert specs, f"{type(model).__name__} has no layers under {prefix}"
    if any(spec != specs[0] for spec in specs):
        raise ValueError(
            f"--enable-graft: the layers of {type(model).__name__} differ in shape;"
            " start it without --enable-graft"
        )
    return ModelSpec(len(specs), specs[0], dtype, layer_prefix=prefix, vocab_size=vocab_size)
