"""Reading a PEFT LoRA folder: applied exactly, or refused with the reason; never partly."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from sglang_graft.adapters.adapter import Adapter, Delta, identity_of
from sglang_graft.adapters.base import BaseWeight, base_weight_of, check_copy
from sglang_graft.adapters.bits import Block
from sglang_graft.adapters.check import check_tensors
from sglang_graft.adapters.config import read_config
from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.names import BaseCopy, Module, ModuleTensors, NameReader
from sglang_graft.adapters.scale import ScaleRule
from sglang_graft.adapters.spec import LinearSpec, ModelSpec
from sglang_graft.adapters.targets import disagreements
from sglang_graft.adapters.vectors import with_bias, with_dora
from sglang_graft.adapters.vocabulary import refuse_new_tokens
from sglang_graft.adapters.weights import WeightsFile, open_weights

_NO_BASE = (
    "use_dora: no weights of the base model were given, so that its norms are not computed; a "
    "server computes them, and refuses a base model without plain weights"
)


def read_adapter(
    path: str | os.PathLike[str], spec: ModelSpec, base_weight: BaseWeight | None = None
) -> Adapter:
    """Read the folder `path` (`adapter_config.json` and the weights beside it) for `spec`.

    Weights are cast once to `spec.dtype` and live in ordinary host memory. DoRA and copies of base
    weights need `base_weight`; without it, DoRA is checked but not complete. Nothing is fetched,
    and of other files only `added_tokens.json` is read. Raises AdapterError naming file, tensor or
    key.
    """
    folder = Path(path)
    if not os.path.isdir(folder):  # False also for a path too long or with a zero byte in it
        raise AdapterError(folder, "folder", "is not a folder")
    config = read_config(folder)
    refuse_new_tokens(folder, spec)
    rule = ScaleRule(config)
    deltas: dict[tuple[int, str], Delta] = {}
    with open_weights(folder) as weights:
        contents = NameReader(weights.file, spec).contents(weights.names())
        # All headers before any bytes: a wrong adapter is refused without reading it.
        ranks = [check_tensors(weights, tensors, config, rule) for tensors in contents.modules]
        for copy in contents.copies:
            _check_copy(weights, copy, base_weight)
        block = _block(contents.modules, ranks, spec.dtype)
        for tensors, rank in zip(contents.modules, ranks, strict=True):
            scale = rule.scale(tensors.module.path)
            matrices = [weights.load(name, spec.dtype, block) for name in (tensors.a, tensors.b)]
            for member, delta in _deltas(weights, tensors, matrices, scale, rank):
                layer = tensors.module.layer
                if delta.magnitude is not None and base_weight is not None:
                    delta = _with_base(weights, tensors, member, delta, base_weight)
                deltas[layer, member.name] = delta
    modules = [tensors.module for tensors in contents.modules]
    paths = [module.path for module in modules]
    warnings = [*rule.unused_keys(paths), *disagreements(config, modules)]
    if not all(delta.is_complete for delta in deltas.values()):
        warnings.append(_NO_BASE)
    return Adapter(identity_of(deltas), dict(sorted(deltas.items())), folder, tuple(warnings))


def _block(modules: list[ModuleTensors], ranks: list[int], dtype: torch.dtype) -> Block:
    """Memory for A and B of every module."""
    widths = [(t.module.in_features, t.module.out_features) for t in modules]
    pairs = zip(ranks, widths, strict=True)
    return Block(rank * width * dtype.itemsize for rank, pair in pairs for width in pair)


def _deltas(
    weights: WeightsFile,
    tensors: ModuleTensors,
    matrices: list[torch.Tensor],
    scale: float,
    rank: int,
) -> Iterator[tuple[LinearSpec, Delta]]:
    """What A and B of one module are for each of its members, without the base model."""
    a, b = matrices
    # Both stay float32, as PEFT keeps them: they are few, and a product follows.
    bias, magnitude = (
        None if name is None else weights.load(name, torch.float32)
        for name in (tensors.bias, tensors.magnitude)
    )
    for member, rows in split_rows(tensors.module):
        delta = Delta(a, b[rows], scale, rank)
        if magnitude is not None:
            delta = replace(delta, magnitude=magnitude[rows])
        yield member, delta if bias is None else with_bias(delta, bias[rows])


def _with_base(
    weights: WeightsFile,
    tensors: ModuleTensors,
    member: LinearSpec,
    delta: Delta,
    base_weight: BaseWeight,
) -> Delta:
    item = tensors.magnitude
    assert item is not None
    weight, bias = base_weight_of(base_weight, weights, item, tensors.module.layer, member.name)
    wanted = [member.out_features, member.in_features]
    assert list(weight.shape) == wanted, f"{item}: base weight {weight.shape}, wanted {wanted}"
    delta = with_dora(delta, weight, bias)
    if not all(torch.isfinite(vector).all() for _, vector in delta.vectors()):
        raise AdapterError(
            weights.file, item, "divides by a row of the base and adapter weights that is zero"
        )
    return delta


def _check_copy(weights: WeightsFile, copy: BaseCopy, base_weight: BaseWeight | None) -> None:
    found = [
        base_weight_of(base_weight, weights, copy.name, copy.layer, linear)
        for linear in copy.linears
    ]
    parts = [bias if copy.is_bias else weight for weight, bias in found]
    kept = [part for part in parts if part is not None]
    if len(kept) < len(parts):
        raise AdapterError(weights.file, copy.name, "the base model has no bias there")
    check_copy(weights, copy.name, torch.cat(kept) if len(kept) > 1 else kept[0])


def split_rows(module: Module) -> Iterator[tuple[LinearSpec, slice]]:
    """Which outputs of a module belong to each member: rows of B, entries of the vectors."""
    start = 0
    for member in module.members:
        yield member, slice(start, start + member.out_features)
        start += member.out_features
