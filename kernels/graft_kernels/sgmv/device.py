"""Segmented LoRA on a CUDA device: plans and scratch memory that stay put, and the two launches.

Nothing here allocates or waits for the device between `describe` and the end of a forward, so
a forward may be captured into a CUDA graph and replayed for every later batch of as many rows.
"""

from collections.abc import Sequence

import torch

from graft_kernels.sgmv.api import Slice, Weights
from graft_kernels.sgmv.dispatch import (
    DECODE,
    PREFILL,
    PREFILL_SIZES,
    expand_config,
    partial_numbers,
    shrink_config,
)
from graft_kernels.sgmv.plan import Numbers, Plan, Shape
from graft_kernels.sgmv.triton_common import MAX_SLICES, RANK_TILE
from graft_kernels.sgmv.triton_expand import expand
from graft_kernels.sgmv.triton_shrink import shrink


class DeviceSgmv:
    """Adds LoRA deltas for one batch after the other.

    A batch of one row a request (decode) and one of many rows (prefill) are cut differently; each
    kind has its plan. Only graphs of up to `decode_tokens` and `prefill_tokens` rows may be
    captured; larger batches get a plan of their own size. `slices`: those of every projection
    of one layer. ValueError where the kernels cannot read the tiles.

    In decode graphs `shrink` may run beside the base product, as both need only x: `begin` before
    it, `apply` after it. This hides a tenth to a third of what LoRA adds to a step (`dispatch`).
    """

    def __init__(
        self,
        weights: Weights,
        slices: Sequence[Sequence[Slice]],
        max_rank: int,
        decode_tokens: int,
        prefill_tokens: int,
    ) -> None:
        _check(weights, slices)
        self.weights = weights
        self._ranks = -(-max_rank // RANK_TILE) * RANK_TILE
        self._slices = max(map(len, slices))
        self._slots, self._device = len(weights.ranks), weights.arena.device
        self._plans = {
            shape: self._plan(shape, tokens)
            for shape, tokens in ((DECODE, decode_tokens), (PREFILL, prefill_tokens))
        }
        self._plan_of_batch = self._plans[PREFILL]
        self._grown: Plan | None = None
        self._retired: list[torch.Tensor] = []
        numbers = (self._numbers(shape, plan.max_tokens) for shape, plan in self._plans.items())
        self._partial = torch.empty(max(numbers), dtype=torch.float32, device=self._device)
        self._overlap = _can_overlap(self._device)
        self._beside = _make_stream(self._device)
        self._begun: torch.Tensor | None = None
        self.begun = 0
        """How often `begin` started a launch: layers and projections of all captured graphs."""

    def describe(
        self, slots: Sequence[int], lengths: Sequence[int], rank_tiles: Numbers, *, decode: bool
    ) -> None:
        """Set the batch: request i is the next `lengths[i]` rows of the adapter in `slots[i]`."""
        total = sum(lengths)
        plan = self._plans[DECODE if decode else PREFILL]
        if total > plan.max_tokens:
            plan = self._plans[PREFILL]
        if total > plan.max_tokens:
            plan = self._grow(total)
        plan.fill(slots, lengths, rank_tiles)
        self._plan_of_batch = plan

    def clear(self, *, decode: bool) -> None:
        """Set a batch without adapters."""
        self._plan_of_batch = self._plans[DECODE if decode else PREFILL]
        self._plan_of_batch.clear()

    def begin(self, x: torch.Tensor, slices: Sequence[Slice]) -> None:
        """Let `shrink` of `x` `[T, K]` run beside what the current stream does until `apply`.

        Does nothing but where a decode graph is captured: outside of graphs it is the launches
        that cost.
        """
        if self._plan_of_batch.shape != DECODE or not torch.cuda.is_current_stream_capturing():
            return
        assert self._begun is None, f"rows {list(self._begun.shape)} were begun and not applied"
        assert self._beside is not None
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            self._shrink(x, slices, len(x))
        # Kept, so that its memory is not used again before the streams have met.
        self._begun = x
        self.begun += 1

    def apply(self, x: torch.Tensor, slices: Sequence[Slice], out: torch.Tensor) -> torch.Tensor:
        """Add the deltas of `x` `[T, K]` to `out` `[T, N]` in place; returns `out`.

        T may be above the rows of the batch: what a graph pads is left alone.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            self._launch(x, slices, out, len(x))
            return out
        same = begun.data_ptr() == x.data_ptr() and begun.shape == x.shape
        assert same, f"rows {list(begun.shape)} were begun, {list(x.shape)} are applied"
        assert self._beside is not None
        torch.cuda.current_stream().wait_stream(self._beside)
        self._expand(x, slices, out, len(x), overlap=self._overlap)
        return out

    def compile(self, slices: Sequence[Slice]) -> None:
        """Compile what `apply` can launch for this projection, by launches on an empty batch."""
        outputs = max(piece.out_offset + piece.b.features for piece in slices)
        x, out = (
            torch.zeros(DECODE.block_rows, width, dtype=self.weights.dtype, device=self._device)
            for width in (slices[0].a.features, outputs)
        )
        for decode, sizes in ((True, (1,)), (False, PREFILL_SIZES)):
            self.clear(decode=decode)
            for tokens in sizes:
                self._launch(x, slices, out, tokens)
                if decode:
                    self._expand(x, slices, out, tokens, overlap=self._overlap)

    def _launch(
        self, x: torch.Tensor, slices: Sequence[Slice], out: torch.Tensor, tokens: int
    ) -> None:
        """Both launches, with the parameters that fit `tokens` rows."""
        self._shrink(x, slices, tokens)
        self._expand(x, slices, out, tokens, overlap=False)

    def _shrink(self, x: torch.Tensor, slices: Sequence[Slice], tokens: int) -> None:
        plan = self._plan_of_batch
        config = shrink_config(plan.shape, tokens, x.shape[1])
        partial = self._partial_sums(config.splits, len(slices), len(x))
        shrink(x, slices, plan, self.weights, partial, config)

    def _expand(
        self,
        x: torch.Tensor,
        slices: Sequence[Slice],
        out: torch.Tensor,
        tokens: int,
        *,
        overlap: bool,
    ) -> None:
        plan = self._plan_of_batch
        splits = shrink_config(plan.shape, tokens, x.shape[1]).splits
        partial = self._partial_sums(splits, len(slices), len(x))
        config = expand_config(plan.shape, overlap=overlap)
        expand(partial, slices, plan, self.weights, out, config)

    def _plan(self, shape: Shape, tokens: int) -> Plan:
        return Plan(tokens, self._slots, self._ranks // RANK_TILE, shape, self._device)

    def _grow(self, tokens: int) -> Plan:
        if self._grown is None or self._grown.max_tokens < tokens:
            self._grown = self._plan(PREFILL, tokens)
            numbers = self._numbers(PREFILL, tokens)
            if numbers > self._partial.numel():
                # Captured graphs go on with the memory that they know.
                self._retired.append(self._partial)
                self._partial = self._partial.new_empty(numbers)
        return self._grown

    def _numbers(self, shape: Shape, tokens: int) -> int:
        return partial_numbers(shape, tokens, self._slices, self._ranks)

    def _partial_sums(self, splits: int, slices: int, rows: int) -> torch.Tensor:
        wanted = splits * slices * rows * self._ranks
        assert wanted <= self._partial.numel(), f"{wanted} partial sums, {self._partial.numel()}"
        return self._partial[:wanted].view(splits, slices, rows, self._ranks)


def _check(weights: Weights, slices: Sequence[Sequence[Slice]]) -> None:
    if weights.rank_tile != RANK_TILE:
        raise ValueError(f"Weights.rank_tile: wanted {RANK_TILE}, got {weights.rank_tile}")
    for pieces in slices:
        if len(pieces) > MAX_SLICES:
            raise ValueError(f"slices: wanted at most {MAX_SLICES} in a projection: {len(pieces)}")
        sides = [part for piece in pieces for part in (piece.a, piece.b, piece.mul, piece.add)]
        split = [side.features for side in sides if side is not None and side.chunks > 1]
        if split:
            raise ValueError(
                f"a tile of {split[0]} features is larger than a page, which the CUDA kernels"
                " cannot read; set --page-size to more tokens"
            )


def _make_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _can_overlap(device: torch.device) -> bool:
    """Programmatic dependent launch exists from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
