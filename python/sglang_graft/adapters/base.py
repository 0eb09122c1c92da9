"""The base model's own weights, as far as an adapter needs them. Nothing here knows an engine."""

from collections.abc import Callable

import torch

from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.weights import WeightsFile

BaseWeight = Callable[[int | None, str], tuple[torch.Tensor, torch.Tensor | None]]
"""(layer, linear) -> weight `[out_features, in_features]` and bias `[out_features]` or None.

Of a fused group's member these are its own rows. Layer None stands for what is outside the layers:
"lm_head" or "embed_tokens", `[vocab_size, hidden]`. Any float dtype, on any device. Raises
NoBaseWeight where the base model has no such weights to show.
"""

_ROWS_AT_ONCE = 4096


class NoBaseWeight(LookupError):
    """The base model has no plain weights there; the text says why (quantized, not loaded, ...)."""


def base_weight_of(
    base: BaseWeight | None, weights: WeightsFile, item: str, layer: int | None, linear: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias that tensor `item` of the file refers to. AdapterError when there is none."""
    if base is None:
        raise AdapterError(weights.file, item, "needs the weights of the base model to be checked")
    try:
        return base(layer, linear)
    except NoBaseWeight as error:
        raise AdapterError(weights.file, item, f"needs plain base weights: {error}") from error


def check_copy(weights: WeightsFile, name: str, base: torch.Tensor) -> None:
    """Raise AdapterError unless tensor `name` equals `base` once it is cast to its dtype."""
    shape = weights.shape(name)
    if shape != list(base.shape):
        raise AdapterError(
            weights.file, name, f"wanted a copy of the base model's {list(base.shape)}, got {shape}"
        )
    copy = weights.load(name, base.dtype)
    for start in range(0, len(base), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        if not torch.equal(base[rows].cpu(), copy[rows]):
            raise AdapterError(
                weights.file,
                name,
                "differs from the base model: the adapter belongs to a changed base model",
            )
