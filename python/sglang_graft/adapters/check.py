"""Shapes: does a pair of matrices fit the model, each other, and the config?"""

from collections.abc import Sequence

from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.names import TensorPair
from sglang_graft.adapters.scale import ScaleRule
from sglang_graft.adapters.weights import WeightsFile


def check_pair(weights: WeightsFile, pair: TensorPair, rule: ScaleRule) -> int:
    """The rank of the pair. Reads headers only; raises AdapterError with both shapes or ranks."""
    module = pair.module
    a_shape, b_shape = weights.shape(pair.a), weights.shape(pair.b)
    rank = a_shape[0] if a_shape else 0
    _check_shape(weights, pair.a, a_shape, [rank, module.in_features])
    _check_shape(weights, pair.b, b_shape, [module.out_features, rank])
    wanted = rule.rank(module.path)
    if rank != wanted:
        raise AdapterError(
            weights.file,
            pair.a,
            f"wanted rank {wanted} (r and rank_pattern of the config), got rank {rank}",
        )
    return rank


def _check_shape(
    weights: WeightsFile, name: str, got: Sequence[int], wanted: Sequence[int]
) -> None:
    if got != wanted:
        raise AdapterError(
            weights.file, name, f"wanted shape {wanted} for this base model, got {got}"
        )
