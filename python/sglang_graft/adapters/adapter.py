"""An adapter in memory: every matrix as it is applied, and the hash that names it."""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_graft.adapters.tiles import VectorName


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """What an adapter does to one linear: `y = (y + ((x @ a.T) @ b.T) * scale) * mul + add`.

    `a` is `[rank, in_features]` and `b` is `[out_features, rank]`, contiguous CPU tensors of the
    model's dtype. Linears that come from one fused tensor share the same `a`. The rest are float32
    `[out_features]`, None where there is none: `magnitude` (DoRA) and `bias` (of lora_B) as the
    file has them, `mul` and `add` as they are applied (`vectors.py`). `mul` of DoRA is None as long
    as no base weights were at hand; such an adapter can be judged and measured, not served.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    rank: int
    magnitude: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mul: torch.Tensor | None = None
    add: torch.Tensor | None = None

    @property
    def is_complete(self) -> bool:
        """Whether everything that is applied has been computed."""
        return self.magnitude is None or self.mul is not None

    def vectors(self) -> Iterator[tuple[VectorName, torch.Tensor]]:
        """`mul` and `add`, as far as they are there; an uncomputed `mul` has its size only."""
        if self.mul is not None:
            yield "mul", self.mul
        elif self.magnitude is not None:
            yield "mul", self.magnitude.to("meta")
        if self.add is not None:
            yield "add", self.add


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A checked adapter. `deltas` holds only the linears that it touches, keyed `(layer, name)`.

    `identity` (sha256 hex) covers what is applied and nothing else: not names, paths or file order.
    `warnings` are sentences for the operator about a config that disagrees with the weights.
    """

    identity: str
    deltas: dict[tuple[int, str], Delta]
    path: Path
    warnings: tuple[str, ...] = ()

    @property
    def max_rank(self) -> int:
        """The largest rank of any linear."""
        return max(delta.rank for delta in self.deltas.values())


def identity_of(deltas: dict[tuple[int, str], Delta]) -> str:
    """sha256 hex over names, ranks, scales, shapes, dtype and bytes, in the order of the keys.

    `mul` and `add` follow from these and the base model, so that the hash is the same with and
    without base weights at hand.
    """
    digest = hashlib.sha256()
    for (layer, name), delta in sorted(deltas.items()):
        digest.update(f"{layer}/{name}/{delta.rank}/".encode())
        digest.update(struct.pack("<d", delta.scale))
        parts = {"a": delta.a, "b": delta.b, "magnitude": delta.magnitude, "bias": delta.bias}
        for kind, tensor in parts.items():
            if tensor is not None:
                digest.update(f"{kind}{tensor.dtype}{list(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
