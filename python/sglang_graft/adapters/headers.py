"""Would an adapter be applied? Answered from its config and tensor headers, without its weights."""

import os
from dataclasses import dataclass
from pathlib import Path

from sglang_graft.adapters.check import check_tensors
from sglang_graft.adapters.config import read_config
from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.names import NameReader
from sglang_graft.adapters.scale import ScaleRule
from sglang_graft.adapters.spec import ModelSpec
from sglang_graft.adapters.vocabulary import refuse_new_tokens
from sglang_graft.adapters.weights import open_weights


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server can take: the largest rank, and bytes of weights in its whole pool."""

    rank: int
    nbytes: int


def check_headers(path: str | os.PathLike[str], spec: ModelSpec, limits: Limits) -> None:
    """Raise the AdapterError that `read_adapter` would, as far as headers tell.

    They do not tell of NaN, of unreadable weights, or whether a copy of base weights is one. Bytes
    are counted without vectors and the rounding to pages, so what passes may still be too large.
    """
    folder = Path(path)
    if not os.path.isdir(folder):
        raise AdapterError(folder, "folder", "is not a folder")
    config = read_config(folder)
    refuse_new_tokens(folder, spec)
    rule = ScaleRule(config)
    nbytes = 0
    with open_weights(folder) as weights:
        for tensors in NameReader(weights.file, spec).contents(weights.names()).modules:
            rank = check_tensors(weights, tensors, config, rule)
            if rank > limits.rank:
                raise AdapterError(
                    weights.file,
                    tensors.a,
                    f"wanted a rank of at most {limits.rank}, got {rank}; raise --max-lora-rank",
                )
            module = tensors.module
            nbytes += rank * (module.in_features + module.out_features) * spec.dtype.itemsize
    if nbytes > limits.nbytes:
        raise AdapterError(
            folder,
            "size",
            f"its weights take {nbytes} bytes, the whole pool has {limits.nbytes};"
            " raise --max-total-tokens or --mem-fraction-static",
        )
