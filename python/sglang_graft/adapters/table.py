"""The pointer table: where the tiles of each resident adapter are on the device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from sglang_graft.adapters.image import AdapterImage
from sglang_graft.adapters.tiles import VECTORS, SideName, TileMap

_SIDES: tuple[SideName, SideName] = ("A", "B")


class PointerTable:
    """One row a slot: `addresses` int64 `[slots, tiles]` (0 = absent), `ranks` int32 and `scales`
    float32 `[slots, columns]`.

    `host_*` are the truth. The device tensors are the same objects on the CPU; else copies on the
    current stream refresh them in place (their own addresses never change, so CUDA graphs may keep
    them). Slot 0 is the base model and stays zero. The caller keeps a slot unchanged while a
    launched forward on another stream may read it.
    """

    def __init__(self, slots: int, tile_map: TileMap, device: torch.device | str) -> None:
        if slots < 2:
            raise ValueError(f"slots: wanted at least 2 (slot 0 is the base model), got {slots}")
        self.slots = slots
        self.tile_map = tile_map
        self.device = torch.device(device)
        self.host_addresses = torch.zeros((slots, tile_map.tiles), dtype=torch.int64)
        self.host_ranks = torch.zeros((slots, tile_map.columns), dtype=torch.int32)
        self.host_scales = torch.zeros((slots, tile_map.columns), dtype=torch.float32)
        # `.to` returns the tensor itself when it is on that device already.
        self.addresses = self.host_addresses.to(self.device)
        self.ranks = self.host_ranks.to(self.device)
        self.scales = self.host_scales.to(self.device)
        self._rank_tiles: npt.NDArray[np.int32] = np.zeros(slots, dtype=np.int32)

    def set(
        self, slot: int, image: AdapterImage, pages: list[int], base_address: int, page_bytes: int
    ) -> None:
        """Point `slot` at `image`, whose page i lies in arena page `pages[i]`.

        `base_address` is the address of byte 0 of the arena. Raises ValueError for slot 0, a slot
        that does not exist, a page count or a page size other than the image's.
        """
        self._check_slot(slot)
        if page_bytes != self.tile_map.page_bytes:
            raise ValueError(f"page_bytes: wanted {self.tile_map.page_bytes}, got {page_bytes}")
        if len(pages) != image.pages.shape[0]:
            raise ValueError(f"pages: wanted {image.pages.shape[0]}, got {len(pages)}")
        starts = base_address + np.asarray(pages, dtype=np.int64) * page_bytes
        row = np.zeros(self.tile_map.tiles, dtype=np.int64)
        row[image.tile] = starts[image.page] + image.offset
        self.host_addresses[slot] = torch.from_numpy(row)
        self.host_ranks[slot] = torch.from_numpy(image.ranks)
        self.host_scales[slot] = torch.from_numpy(image.scales)
        self._refresh(slot)

    def clear(self, slot: int) -> None:
        """Make `slot` absent: all zero. ValueError as in `set`."""
        self._check_slot(slot)
        for host in (self.host_addresses, self.host_ranks, self.host_scales):
            host[slot].zero_()
        self._refresh(slot)

    def rank_tiles(self) -> npt.NDArray[np.int32]:
        """Rank tiles of each slot's widest linear, int32 `[slots]`. Do not write to it."""
        return self._rank_tiles

    def _check_slot(self, slot: int) -> None:
        if not 1 <= slot < self.slots:
            raise ValueError(
                f"slot: wanted 1..{self.slots - 1} (slot 0 is the base model), got {slot}"
            )

    def _refresh(self, slot: int) -> None:
        self._rank_tiles[slot] = -(-int(self.host_ranks[slot].max()) // self.tile_map.rank_tile)
        for host, device in self._pairs():
            if host is not device:
                # A fresh pinned copy, because the host row may change again before the copy has
                # run; torch keeps the block until it has.
                device[slot].copy_(host[slot].pin_memory(), non_blocking=True)

    def _pairs(self) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        return (
            (self.host_addresses, self.addresses),
            (self.host_ranks, self.ranks),
            (self.host_scales, self.scales),
        )

    def check_invariants(self) -> None:
        """Assert that each row points at exactly the tiles its ranks ask for. Synchronises."""
        for host, device in self._pairs():
            assert torch.equal(host, device.cpu()), "the device table differs from the host's"
            assert not host[0].any(), "slot 0, the base model, is not zero"
        for slot in range(1, self.slots):
            present = self.host_addresses[slot].nonzero().flatten().tolist()
            assert present == self._wanted_tiles(slot), f"slot {slot}: tiles do not fit its ranks"
        tiles = -(-self.host_ranks.amax(dim=1).numpy() // self.tile_map.rank_tile)
        assert np.array_equal(tiles, self._rank_tiles), f"rank tiles {tiles}, {self._rank_tiles}"

    def _wanted_tiles(self, slot: int) -> list[int]:
        """What the ranks ask for, and each vector whose first chunk is there, as a whole.

        A linear that the adapter does not touch has no vectors.
        """
        wanted: list[int] = []
        tile_map = self.tile_map
        for layer in range(tile_map.spec.layers):
            for linear in tile_map.spec.linears:
                rank = int(self.host_ranks[slot, tile_map.column(layer, linear.name)])
                for side in _SIDES:
                    tiles = tile_map.tiles_of(layer, linear.name, side, rank)
                    wanted += [tile.index for tile in tiles]
                for name in VECTORS:
                    first = tile_map.vector(layer, linear.name, name).first
                    if rank and self.host_addresses[slot, first]:
                        vector = tile_map.tiles_of_vector(layer, linear.name, name)
                        wanted += [tile.index for tile in vector]
        return wanted
