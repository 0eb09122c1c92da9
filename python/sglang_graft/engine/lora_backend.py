"""The LoRA backend that `--lora-backend graft` names: our kernels behind SGLang's backend API.

Seam (0.5.17): `register_lora_backend`. SGLang's LoRA layers hand their "buffers" to the backend
unopened and read only shapes from them, so a layer's buffer here is a `WeightRef`: which tiles of
the pointer table belong to it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.backend.lora_registry import register_lora_backend

from graft_kernels.sgmv import Side, Slice, Vector
from sglang_graft.adapters import PointerTable, TileMap
from sglang_graft.adapters.tiles import SideName, VectorName
from sglang_graft.engine.flags import BACKEND
from sglang_graft.engine.graphs import is_recording_adapters
from sglang_graft.engine.lora_batches import Batches, DeviceBatches, HostBatches

GRAPHLESS_DECODE_ROWS = 256
"""Decode rows to provide for where no graphs are captured; larger batches are served as prefill."""


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


class BatchInfo:
    """Says to SGLang's LoRA layers that this forward applies adapters; the rows are elsewhere."""

    has_active_lora = True


class GraftLoRABackend(BaseLoRABackend):
    """Adds LoRA deltas from the arena to base outputs, grouped by adapter."""

    name = BACKEND

    def __init__(self, max_loras_per_batch: int, device: torch.device, server_args: Any) -> None:
        super().__init__(max_loras_per_batch, device)
        self.supports_prefill_cuda_graph = device.type == "cuda"
        self._server_args = server_args
        self._batches: Batches | None = None

    def bind(
        self,
        table: PointerTable,
        arena: torch.Tensor,
        projections: list[tuple[Slice, ...]],
        max_rank: int,
    ) -> None:
        """The arena exists; `projections` are the stacked linears of a layer. Compiles kernels."""
        dtype = table.tile_map.spec.dtype
        if arena.is_cuda:
            decode, prefill = _graph_rows(self._server_args)
            self._batches = DeviceBatches(
                table,
                arena,
                dtype,
                projections,
                max_rank=max_rank,
                decode_rows=decode,
                prefill_rows=prefill,
            )
        else:
            self._batches = HostBatches(table, arena, dtype)

    def set_batch(self, slots: list[int], lengths: list[int], *, decode: bool) -> None:
        """Describe the forward that comes next: request i is `lengths[i]` rows of `slots[i]`."""
        active = self._bound().describe(slots, lengths, decode=decode)
        self.batch_info = BatchInfo() if active or is_recording_adapters() else None

    def init_cuda_graph_batch_info(
        self, max_bs_in_cuda_graph: int, num_tokens_per_req: int
    ) -> None:
        """Nothing to allocate: all metadata stays put from the start."""
        self._bound().check_graph_rows(max_bs_in_cuda_graph * num_tokens_per_req, decode=True)

    def init_prefill_cuda_graph_batch_info(self, max_num_tokens: int) -> None:
        """As for decode, and tell SGLang what a prefill graph may hold."""
        self._bound().check_graph_rows(max_num_tokens, decode=False)
        self.prefill_cuda_graph_max_bs = max_num_tokens
        self.prefill_cuda_graph_max_tokens = max_num_tokens

    def begin(self, x: torch.Tensor, weights: WeightRef) -> None:
        """Before the base product of x `[T, K]`, whose deltas are asked for after it."""
        self._bound().begin(x, weights.slices)

    @property
    def begun(self) -> int:
        """How often `begin` began something."""
        return self._bound().begun

    def run_lora_a_sgemm(self, x: torch.Tensor, weights: WeightRef, **_: Any) -> torch.Tensor:
        """x `[T, K]` itself: without tensor parallelism nothing stands between A and B."""
        return x

    def run_lora_b_sgemm(
        self, x: torch.Tensor, weights: WeightRef, base_output: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """Add the deltas of what `run_lora_a_sgemm` returned into `base_output` `[T, N]`."""
        return self._bound().apply(x, weights.slices, base_output)

    def run_qkv_lora(
        self,
        x: torch.Tensor,
        qkv_lora_a: WeightRef,
        qkv_lora_b: WeightRef,
        base_output: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Add the deltas of all stacked linears into `base_output` `[T, N]`."""
        return self._bound().apply(x, qkv_lora_b.slices, base_output)

    def run_gate_up_lora(
        self,
        x: torch.Tensor,
        gate_up_lora_a: WeightRef,
        gate_up_lora_b: WeightRef,
        base_output: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """As `run_qkv_lora`, for two linears of equal size."""
        return self._bound().apply(x, gate_up_lora_b.slices, base_output)

    def _bound(self) -> Batches:
        assert self._batches is not None, "a forward before the arena was bound"
        return self._batches


def _graph_rows(server_args: Any) -> tuple[int, int]:
    """The most rows of a decode and of a prefill batch that LoRA metadata has to hold."""
    graphs = server_args.cuda_graph_config
    decode = max(graphs.decode.bs or [GRAPHLESS_DECODE_ROWS])
    return decode, max(*(graphs.prefill.bs or [1]), server_args.chunked_prefill_size or 1, 1)


def register() -> None:
    """Make `--lora-backend graft` known to SGLang's registry."""
    register_lora_backend(BACKEND)(lambda: GraftLoRABackend)
