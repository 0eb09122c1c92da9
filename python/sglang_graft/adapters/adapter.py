"""An adapter in memory: every matrix as it is applied, and the hash that names it."""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """What an adapter adds to one linear: `y += ((x @ a.T) @ b.T) * scale`.

    `a` is `[rank, in_features]` and `b` is `[out_features, rank]`, contiguous CPU tensors of the
    model's dtype. Linears that come from one fused tensor share the same `a`.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    rank: int


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
    """sha256 hex over names, ranks, scales, shapes, dtype and bytes, in the order of the keys."""
    digest = hashlib.sha256()
    for (layer, name), delta in sorted(deltas.items()):
        digest.update(f"{layer}/{name}/{delta.rank}/".encode())
        digest.update(struct.pack("<d", delta.scale))
        for matrix in (delta.a, delta.b):
            digest.update(f"{matrix.dtype}{list(matrix.shape)}".encode())
            digest.update(matrix.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
