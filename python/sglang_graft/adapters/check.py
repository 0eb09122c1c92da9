"""Shapes and flags: do a module's tensors fit the model, each other, and the config?"""

from collections.abc import Sequence

from sglang_graft.adapters.config import LoraConfig
from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.names import ModuleTensors
from sglang_graft.adapters.scale import ScaleRule
from sglang_graft.adapters.weights import WeightsFile


def check_tensors(
    weights: WeightsFile, tensors: ModuleTensors, config: LoraConfig, rule: ScaleRule
) -> int:
    """The rank of the module. Reads headers only; raises AdapterError with wanted and got."""
    module = tensors.module
    _check_names(weights, tensors, config)
    a_shape, b_shape = weights.shape(tensors.a), weights.shape(tensors.b)
    rank = a_shape[0] if a_shape else 0
    _check_shape(weights, tensors.a, a_shape, [rank, module.in_features])
    _check_shape(weights, tensors.b, b_shape, [module.out_features, rank])
    for vector in (tensors.bias, tensors.magnitude):
        if vector is not None:
            _check_shape(weights, vector, weights.shape(vector), [module.out_features])
    wanted = rule.rank(module.path)
    if rank != wanted:
        raise AdapterError(
            weights.file,
            tensors.a,
            f"wanted rank {wanted} (r and rank_pattern of the config), got rank {rank}",
        )
    _check_path(weights, tensors, rule)
    return rank


def _check_names(weights: WeightsFile, tensors: ModuleTensors, config: LoraConfig) -> None:
    """A module has a magnitude or a bias exactly when the config says so.

    PEFT fills a missing one with start values and drops one too many.
    """
    for key, flag, name, what in (
        ("use_dora", config.use_dora, tensors.magnitude, "lora_magnitude_vector"),
        ("lora_bias", config.lora_bias, tensors.bias, "lora_B.bias"),
    ):
        if flag and name is None:
            raise AdapterError(
                weights.file, tensors.a, f"its {what} is missing, and the config has {key} on"
            )
        if name is not None and not flag:
            raise AdapterError(
                weights.file, name, f"wanted no {what}: the config does not have {key} on"
            )


def _check_path(weights: WeightsFile, tensors: ModuleTensors, rule: ScaleRule) -> None:
    """Refuse a module that the patterns treat differently under the served model's own path."""
    module = tensors.module
    if module.path == module.model_path:
        return
    ours = rule.rank(module.model_path), rule.scale(module.model_path)
    theirs = rule.rank(module.path), rule.scale(module.path)
    if ours != theirs:
        raise AdapterError(
            weights.file,
            tensors.a,
            f"is {module.model_path} of this model, but the patterns of the config give rank and "
            f"scale {theirs} under the one path and {ours} under the other; rename the tensors",
        )


def _check_shape(
    weights: WeightsFile, name: str, got: Sequence[int], wanted: Sequence[int]
) -> None:
    if got != wanted:
        raise AdapterError(
            weights.file, name, f"wanted shape {wanted} for this base model, got {got}"
        )
