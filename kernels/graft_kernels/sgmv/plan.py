"""The rows of a batch grouped by adapter, and who works on them, in device memory that stays put.

CUDA graphs read a plan by address, so each forward refreshes it in place, by one small copy from
pinned memory on the current stream. All lists are valid for every layer and projection: they speak
of slots, rows and rank tiles, never of addresses or widths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ITEM = 4
"""int32 numbers of an item: slot, first row position, rows, rank tile."""
PART = 8
"""int32 numbers of a part: slot, first row position, rows, part, parts of the block; the rest 0."""
ALIGN = 4
"""int32 numbers of 16 bytes, the most that Triton asks of an address."""

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Shape:
    """How a plan cuts its batch.

    block_rows: rows of a block, all of one adapter.   programs: how many programs `expand` starts
    at least; blocks share them evenly, so that few blocks are cut into many parts of the outputs
    and many blocks into few.
    """

    block_rows: int
    programs: int


class Plan:
    """Work lists of one batch. A row of zeros says: nothing more.

    `items` int32 `[max_items, ITEM]`: a block and one of its rank tiles, for `shrink`.   `parts`
    int32 `[max_parts, PART]`: a block and its share of the outputs, for `expand`.   `rows` int32
    `[max_tokens]`: the token in each row position. Tokens of slot 0 are nowhere.
    """

    def __init__(
        self,
        max_tokens: int,
        slots: int,
        max_rank_tiles: int,
        shape: Shape,
        device: torch.device | str,
    ) -> None:
        rows = shape.block_rows
        if max_tokens < 1 or slots < 2 or rows < 16 or rows & (rows - 1) or shape.programs < 1:
            raise ValueError(
                "Plan: wanted max_tokens >= 1, slots >= 2, block_rows a power of two from 16 and "
                f"programs >= 1, got {max_tokens}, {slots}, {rows} and {shape.programs}"
            )
        self.max_tokens, self.slots, self.shape = max_tokens, slots, shape
        blocks = self.blocks_for(max_tokens)
        self.max_items, self.max_parts = blocks * max_rank_tiles, max(blocks, shape.programs)
        at_rows = self.max_parts * PART
        # Every list is aligned alike, whatever its length: Triton compiles for alignments anew.
        self._at_items = at_items = at_rows + -(-max_tokens // ALIGN) * ALIGN
        self._buffer = torch.zeros(
            at_items + self.max_items * ITEM, dtype=torch.int32, device=device
        )
        self.parts = self._buffer[:at_rows].view(-1, PART)
        self.rows = self._buffer[at_rows:][:max_tokens]
        self.items = self._buffer[at_items:].view(-1, ITEM)
        self._used_items = 0
        self._is_clear = True

    def blocks_for(self, tokens: int) -> int:
        """The most blocks that any batch of `tokens` rows can have."""
        return min(tokens, -(-tokens // self.shape.block_rows) + self.slots - 1)

    def parts_for(self, tokens: int) -> int:
        """The programs that `expand` starts for `tokens` rows."""
        return max(self.blocks_for(tokens), self.shape.programs)

    def fill(self, slots: Sequence[int], lengths: Sequence[int], rank_tiles: Numbers) -> None:
        """Describe a batch: request i is the next `lengths[i]` rows, of the adapter in `slots[i]`.

        `rank_tiles` `[slots]`: rank tiles of each slot's widest linear. Copies on the current
        stream. ValueError when the batch is larger than the plan.
        """
        total = sum(lengths)
        if len(slots) != len(lengths) or total > self.max_tokens:
            raise ValueError(
                f"Plan.fill: wanted one length for each of {len(slots)} slots and at most "
                f"{self.max_tokens} rows, got {len(lengths)} lengths of {total} rows"
            )
        order, blocks = _group(slots, lengths, self.shape.block_rows)
        items = _items(blocks, rank_tiles)
        # Entries that the last batch used and this one does not have to become zero again.
        listed = max(len(items), self._used_items)
        self._used_items = len(items)
        host = np.zeros(self._at_items + listed * ITEM, dtype=np.int32)
        parts = _parts(blocks, self.parts_for(total))
        host[: parts.size] = parts.ravel()
        host[self.max_parts * PART :][: len(order)] = order
        host[self._at_items :][: items.size] = items.ravel()
        self._upload(host)
        self._is_clear = not len(blocks)

    def clear(self) -> None:
        """Describe a batch in which no row has an adapter."""
        if self._is_clear:
            return
        self._is_clear = True
        self.parts.zero_()
        self.items[: self._used_items].zero_()
        self._used_items = 0

    def _upload(self, host: Numbers) -> None:
        target = self._buffer[: len(host)]
        if target.is_cuda:
            # A fresh pinned copy each time: the last one may still be on its way.
            target.copy_(torch.from_numpy(host).pin_memory(), non_blocking=True)
        else:
            target.copy_(torch.from_numpy(host))


def _group(
    slots: Sequence[int], lengths: Sequence[int], block_rows: int
) -> tuple[npt.NDArray[np.integer[Any]], Numbers]:
    """Tokens sorted by slot, without slot 0, and blocks `[n, 3]`: slot, first position, rows."""
    if len(slots) == 1:
        return _whole(slots[0], lengths[0], block_rows)
    of_token = np.repeat(np.asarray(slots, dtype=np.int64), lengths)
    # Stable, so that rows of one adapter keep their order and usually adjoin.
    order = np.argsort(of_token, kind="stable")
    order = order[np.searchsorted(of_token[order], 1) :]
    present, firsts, counts = np.unique(of_token[order], return_index=True, return_counts=True)
    blocks = [
        (slot, first + start, min(block_rows, count - start))
        for slot, first, count in zip(present, firsts, counts, strict=True)
        for start in range(0, count, block_rows)
    ]
    return order, np.array(blocks, dtype=np.int32).reshape(-1, 3)


def _whole(slot: int, total: int, block_rows: int) -> tuple[Numbers, Numbers]:
    """What `_group` returns for one request."""
    total = total if slot else 0
    firsts = np.arange(0, total, block_rows, dtype=np.int32)
    blocks = np.empty((len(firsts), 3), dtype=np.int32)
    blocks[:, 0] = slot
    blocks[:, 1] = firsts
    blocks[:, 2] = np.minimum(total - firsts, block_rows)
    return np.arange(total, dtype=np.int32), blocks


def _items(blocks: Numbers, rank_tiles: Numbers) -> Numbers:
    tiles = rank_tiles[blocks[:, 0]]
    ends = np.cumsum(tiles)
    items = np.empty((int(ends[-1]) if len(ends) else 0, ITEM), dtype=np.int32)
    items[:, :3] = blocks.repeat(tiles, axis=0)
    items[:, 3] = np.arange(len(items)) - (ends - tiles).repeat(tiles)
    return items


def _parts(blocks: Numbers, programs: int) -> Numbers:
    if not len(blocks):
        return np.zeros((0, PART), dtype=np.int32)
    each = programs // len(blocks)
    assert each >= 1, f"{len(blocks)} blocks for {programs} programs"
    parts = np.zeros((len(blocks), each, PART), dtype=np.int32)
    parts[:, :, :3] = blocks[:, None]
    parts[:, :, 3] = np.arange(each)
    parts[:, :, 4] = each
    return parts.reshape(-1, PART)
