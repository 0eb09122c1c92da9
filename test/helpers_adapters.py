"""Adapters without files, and reading one back through the pointer table as a kernel would."""

from pathlib import Path

import torch

from sglang_graft.adapters import Adapter, Delta, ModelSpec, PointerTable
from sglang_graft.adapters.tiles import VectorName


def random_adapter(
    spec: ModelSpec, ranks: dict[tuple[int, str], int], seed: int = 0, vectors: str = ""
) -> Adapter:
    """Every linear of `ranks`, with those of the vectors "mul" and "add" that `vectors` names."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {linear.name: linear for linear in spec.linears}
    deltas = {}
    for (layer, name), rank in ranks.items():
        a = torch.randn(rank, sizes[name].in_features, generator=generator).to(spec.dtype)
        b = torch.randn(sizes[name].out_features, rank, generator=generator).to(spec.dtype)
        rows = {
            kind: torch.randn(sizes[name].out_features, generator=generator)
            for kind in vectors.split()
        }
        deltas[layer, name] = Delta(a, b, 1.5 * rank, rank, **rows)
    return Adapter(f"seed {seed}", deltas, Path("none"))


def read_matrix(
    table: PointerTable, arena: torch.Tensor, slot: int, layer: int, linear: str, side: str
) -> torch.Tensor:
    """`[rank, features]` put together from nothing but addresses and a TileRange."""
    tiles = table.tile_map
    where = tiles.side(layer, linear, side)
    rank = int(table.host_ranks[slot, tiles.column(layer, linear)])
    matrix = torch.full((rank, where.features), float("nan"), dtype=tiles.spec.dtype)
    for r in range(where.rank_tiles):
        for c in range(where.chunks):
            address = int(table.host_addresses[slot, where.first + r * where.chunks + c])
            rows = min(tiles.rank_tile, rank - r * tiles.rank_tile)
            if rows <= 0:
                assert address == 0
                continue
            start = c * where.chunk_features
            width = min(where.chunk_features, where.features - start)
            offset = address - arena.data_ptr()
            nbytes = rows * width * tiles.itemsize
            assert offset % 128 == 0
            assert offset // tiles.page_bytes == (offset + nbytes - 1) // tiles.page_bytes
            tile = arena[offset : offset + nbytes].view(tiles.spec.dtype).view(rows, width)
            top = r * tiles.rank_tile
            matrix[top : top + rows, start : start + width] = tile
    return matrix


def read_vector(
    table: PointerTable, arena: torch.Tensor, slot: int, layer: int, linear: str, name: VectorName
) -> torch.Tensor | None:
    """`[features]` put together from nothing but addresses and a VectorRange; None if absent."""
    where = table.tile_map.vector(layer, linear, name)
    addresses = table.host_addresses[slot, where.first : where.first + where.chunks].tolist()
    if not any(addresses):
        return None
    values = torch.full((where.features,), float("nan"))
    for chunk, address in enumerate(addresses):
        start = chunk * where.chunk_features
        width = min(where.chunk_features, where.features - start)
        offset = address - arena.data_ptr()
        assert offset % 128 == 0
        page_bytes = table.tile_map.page_bytes
        assert offset // page_bytes == (offset + width * 4 - 1) // page_bytes
        values[start : start + width] = arena[offset : offset + width * 4].view(torch.float32)
    return values
