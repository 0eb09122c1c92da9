"""Reading a PEFT LoRA folder: applied exactly, or refused with the reason; never partly."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from sglang_graft.adapters.adapter import Adapter, Delta, identity_of
from sglang_graft.adapters.check import check_pair
from sglang_graft.adapters.config import read_config
from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.names import Module, NameReader
from sglang_graft.adapters.scale import ScaleRule
from sglang_graft.adapters.spec import LinearSpec, ModelSpec
from sglang_graft.adapters.targets import disagreements
from sglang_graft.adapters.vocabulary import refuse_new_tokens
from sglang_graft.adapters.weights import open_weights


def read_adapter(path: str | os.PathLike[str], spec: ModelSpec) -> Adapter:
    """Read the folder `path` (`adapter_config.json` and the weights beside it) for `spec`.

    Weights are cast once to `spec.dtype` and live in ordinary host memory. Nothing is fetched, and
    of other files only `added_tokens.json` is read. Raises AdapterError naming file, tensor or key.
    """
    folder = Path(path)
    if not os.path.isdir(folder):  # False also for a path too long or with a zero byte in it
        raise AdapterError(folder, "folder", "is not a folder")
    config = read_config(folder)
    refuse_new_tokens(folder, spec)
    rule = ScaleRule(config)
    deltas: dict[tuple[int, str], Delta] = {}
    with open_weights(folder) as weights:
        pairs = NameReader(weights.file, spec).pairs(weights.names())
        # All headers before any bytes: a wrong adapter is refused without reading it.
        ranks = [check_pair(weights, pair, rule) for pair in pairs]
        for pair, rank in zip(pairs, ranks, strict=True):
            a, b = weights.load(pair.a, spec.dtype), weights.load(pair.b, spec.dtype)
            for member, rows in split_rows(pair.module, b):
                key = (pair.module.layer, member.name)
                deltas[key] = Delta(a, rows, rule.scale(pair.module.path), rank)
    modules = [pair.module for pair in pairs]
    paths = [module.path for module in modules]
    warnings = (*rule.unused_keys(paths), *disagreements(config, modules))
    return Adapter(identity_of(deltas), dict(sorted(deltas.items())), folder, warnings)


def split_rows(module: Module, b: torch.Tensor) -> Iterator[tuple[LinearSpec, torch.Tensor]]:
    """The rows of B `[out_features of all members, rank]` that belong to each member."""
    start = 0
    for member in module.members:
        yield member, b[start : start + member.out_features]
        start += member.out_features
    assert start == b.shape[0], f"{module.path}: {start} rows of {b.shape[0]}"
