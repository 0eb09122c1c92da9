"""The LoRA backend that `--lora-backend graft` names: our kernels behind SGLang's backend API.

Seam (0.5.17): `register_lora_backend`. SGLang's LoRA layers hand their "buffers" to the backend
unopened and read only shapes from them, so a layer's buffer here is a `WeightRef`: which tiles of
the pointer table belong to it.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.backend.lora_registry import register_lora_backend

from graft_kernels.sgmv import Group, Side, Slice, Vector, Weights, expand, sgmv, shrink
from sglang_graft.adapters import TileMap
from sglang_graft.adapters.tiles import SideName, VectorName
from sglang_graft.engine.allocator import upload
from sglang_graft.engine.flags import BACKEND


@dataclass(slots=True)
class WeightRef:
    """Stands where SGLang expects the A or B buffer of one layer's projection.

    shape: what a padded buffer would have, `[slots, stacked * rank, in]` or `[slots, out, rank]`.
    slices: the stacked linears; empty until the arena exists.
    """

    layer: int
    group: str
    shape: tuple[int, int, int]
    device: torch.device
    slices: tuple[Slice, ...] = ()

    def bind(self, tile_map: TileMap) -> None:
        """Find this projection's tiles, once the tile geometry is known."""
        offset, found = 0, []
        for linear in tile_map.spec.groups()[self.group]:
            side_a = _side(tile_map, self.layer, linear.name, "A")
            side_b = _side(tile_map, self.layer, linear.name, "B")
            column = tile_map.column(self.layer, linear.name)
            mul = _vector(tile_map, self.layer, linear.name, "mul")
            add = _vector(tile_map, self.layer, linear.name, "add")
            found.append(
                Slice(a=side_a, b=side_b, column=column, out_offset=offset, mul=mul, add=add)
            )
            offset += linear.out_features
        self.slices = tuple(found)


def _side(tile_map: TileMap, layer: int, linear: str, side: SideName) -> Side:
    tiles = tile_map.side(layer, linear, side)
    return Side(
        first=tiles.first,
        rank_tiles=tiles.rank_tiles,
        chunks=tiles.chunks,
        chunk_features=tiles.chunk_features,
        features=tiles.features,
    )


def _vector(tile_map: TileMap, layer: int, linear: str, name: VectorName) -> Vector:
    tiles = tile_map.vector(layer, linear, name)
    return Vector(
        first=tiles.first,
        chunks=tiles.chunks,
        chunk_features=tiles.chunk_features,
        features=tiles.features,
    )


@dataclass(slots=True)
class BatchInfo:
    """The adapters of one forward: which token rows belong to which slot."""

    groups: list[Group] = field(default_factory=list)

    @property
    def has_active_lora(self) -> bool:
        """Whether any row has an adapter; read by SGLang's LoRA layers."""
        return bool(self.groups)


def make_groups(slots: list[int], lengths: list[int], device: torch.device) -> list[Group]:
    """Rows of a forward grouped by slot; request i owns the next `lengths[i]` rows.

    Requests of the base model (slot 0) are in no group. A slot whose rows adjoin gets a slice.
    """
    runs: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for slot, length in zip(slots, lengths, strict=True):
        end = start + length
        spans = runs.setdefault(slot, [])
        if spans and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
        start = end
    groups = []
    for slot, spans in runs.items():
        if slot == 0:
            continue
        if len(spans) == 1:
            groups.append(Group(slot=slot, rows=slice(*spans[0])))
        else:
            rows = np.concatenate([np.arange(*span, dtype=np.int64) for span in spans])
            groups.append(Group(slot=slot, rows=upload(rows, device)))
    return groups


class GraftLoRABackend(BaseLoRABackend):
    """Adds LoRA deltas from the arena to base outputs, grouped by adapter."""

    name = BACKEND

    def __init__(self, max_loras_per_batch: int, device: torch.device, server_args: Any) -> None:
        super().__init__(max_loras_per_batch, device)
        self.weights: Weights | None = None

    def set_batch(self, slots: list[int], lengths: list[int]) -> None:
        """Describe the forward that comes next: request i is `lengths[i]` rows of `slots[i]`."""
        self.batch_info = BatchInfo(make_groups(slots, lengths, self.device))

    def run_lora_a_sgemm(self, x: torch.Tensor, weights: WeightRef, **_: Any) -> torch.Tensor:
        """x `[T, K]` -> `[T, slices, R]`, the largest rank R of the batch."""
        if not self.batch_info.groups:
            return x
        return shrink(x, weights.slices, self.batch_info.groups, self._bound())

    def run_lora_b_sgemm(
        self, x: torch.Tensor, weights: WeightRef, base_output: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """Add the expansion of what `run_lora_a_sgemm` returned into `base_output` `[T, N]`."""
        if self.batch_info.groups:
            expand(x, weights.slices, self.batch_info.groups, self._bound(), base_output)
        return base_output

    def run_qkv_lora(
        self,
        x: torch.Tensor,
        qkv_lora_a: WeightRef,
        qkv_lora_b: WeightRef,
        base_output: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Add the deltas of all stacked linears into `base_output` `[T, N]`."""
        return self._apply(x, qkv_lora_b, base_output)

    def run_gate_up_lora(
        self,
        x: torch.Tensor,
        gate_up_lora_a: WeightRef,
        gate_up_lora_b: WeightRef,
        base_output: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """As `run_qkv_lora`, for two linears of equal size."""
        return self._apply(x, gate_up_lora_b, base_output)

    def _apply(self, x: torch.Tensor, ref: WeightRef, base_output: torch.Tensor) -> torch.Tensor:
        if self.batch_info.groups:
            sgmv(x, ref.slices, self.batch_info.groups, self._bound(), base_output)
        return base_output

    def _bound(self) -> Weights:
        assert self.weights is not None, "an adapter is in a batch before the arena was bound"
        return self.weights


def register() -> None:
    """Make `--lora-backend graft` known to SGLang's registry."""
    register_lora_backend(BACKEND)(lambda: GraftLoRABackend)
