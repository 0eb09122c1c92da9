"""The rows of a forward and the kernels that serve them: plain torch on the CPU, Triton on CUDA."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from graft_kernels.sgmv import Group, Slice, Weights, sgmv
from graft_kernels.sgmv.device import DeviceSgmv
from sglang_graft.adapters import PointerTable
from sglang_graft.engine.allocator import upload


class Batches(Protocol):
    """What the LoRA backend asks for."""

    def describe(self, slots: list[int], lengths: list[int], *, decode: bool) -> bool:
        """Request i is the next `lengths[i]` rows of `slots[i]`; whether any has an adapter."""

    def begin(self, x: torch.Tensor, slices: Sequence[Slice]) -> None:
        """Begin what needs no base output, where it is worth it; `apply` of the same x follows."""

    def apply(self, x: torch.Tensor, slices: Sequence[Slice], out: torch.Tensor) -> torch.Tensor:
        """Add the deltas of x `[T, K]` to out `[T, N]` in place; returns `out`."""

    @property
    def begun(self) -> int:
        """How often something was begun."""

    def check_graph_rows(self, rows: int, *, decode: bool) -> None:
        """Assert that a graph of so many rows can be captured."""


class HostBatches:
    """The reference kernels, on tables and an arena in host memory."""

    def __init__(self, table: PointerTable, arena: torch.Tensor, dtype: torch.dtype) -> None:
        self._weights = Weights(
            addresses=table.host_addresses,
            ranks=table.host_ranks,
            scales=table.host_scales,
            arena=arena,
            dtype=dtype,
        )
        self._groups: list[Group] = []

    def describe(self, slots: list[int], lengths: list[int], *, decode: bool) -> bool:
        """See `Batches`."""
        self._groups = make_groups(slots, lengths, self._weights.arena.device)
        return bool(self._groups)

    def begin(self, x: torch.Tensor, slices: Sequence[Slice]) -> None:
        """Nothing: there is only one thing at a time."""

    @property
    def begun(self) -> int:
        """See `Batches`."""
        return 0

    def apply(self, x: torch.Tensor, slices: Sequence[Slice], out: torch.Tensor) -> torch.Tensor:
        """See `Batches`."""
        return sgmv(x, slices, self._groups, self._weights, out)

    def check_graph_rows(self, rows: int, *, decode: bool) -> None:
        """Never called: nothing is captured on the CPU."""
        raise AssertionError(f"a CUDA graph of {rows} rows on {self._weights.arena.device}")


class DeviceBatches:
    """The Triton kernels, on metadata that CUDA graphs may keep the addresses of."""

    def __init__(
        self,
        table: PointerTable,
        arena: torch.Tensor,
        dtype: torch.dtype,
        projections: Sequence[Sequence[Slice]],
        *,
        max_rank: int,
        decode_rows: int,
        prefill_rows: int,
    ) -> None:
        weights = Weights(
            addresses=table.addresses,
            ranks=table.ranks,
            scales=table.scales,
            arena=arena,
            dtype=dtype,
        )
        self._table = table
        self._rows = {True: decode_rows, False: prefill_rows}
        self._kernels = DeviceSgmv(weights, projections, max_rank, decode_rows, prefill_rows)
        for slices in projections:
            self._kernels.compile(slices)

    def describe(self, slots: list[int], lengths: list[int], *, decode: bool) -> bool:
        """See `Batches`. A batch without adapters is described too: a graph may be replayed."""
        if not any(slots):
            self._kernels.clear(decode=decode)
            return False
        self._kernels.describe(slots, lengths, self._table.rank_tiles(), decode=decode)
        return True

    def begin(self, x: torch.Tensor, slices: Sequence[Slice]) -> None:
        """See `Batches`."""
        self._kernels.begin(x, slices)

    @property
    def begun(self) -> int:
        """See `Batches`."""
        return self._kernels.begun

    def apply(self, x: torch.Tensor, slices: Sequence[Slice], out: torch.Tensor) -> torch.Tensor:
        """See `Batches`."""
        return self._kernels.apply(x, slices, out)

    def check_graph_rows(self, rows: int, *, decode: bool) -> None:
        """See `Batches`."""
        room = self._rows[decode]
        assert rows <= room, f"a graph of {rows} rows, LoRA metadata for {room}"


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
