"""Rows of a forward grouped by adapter slot."""

from dataclasses import astuple

import torch

from sglang_graft.adapters import LinearSpec, ModelSpec, TileMap
from sglang_graft.engine.lora_backend import WeightRef
from sglang_graft.engine.lora_batches import make_groups

CPU = torch.device("cpu")


def rows(slots: list[int], lengths: list[int]) -> dict[int, list[int]]:
    total = torch.arange(sum(lengths))
    return {group.slot: total[group.rows].tolist() for group in make_groups(slots, lengths, CPU)}


def test_base_only_has_no_group() -> None:
    assert make_groups([0, 0], [3, 4], CPU) == []


def test_adjoining_requests_of_one_slot_are_one_slice() -> None:
    groups = make_groups([2, 2, 1], [3, 4, 1], CPU)
    assert [(g.slot, g.rows) for g in groups] == [(2, slice(0, 7)), (1, slice(7, 8))]


def test_scattered_requests_keep_row_order() -> None:
    assert rows([1, 0, 2, 1], [2, 1, 2, 3]) == {1: [0, 1, 5, 6, 7], 2: [3, 4]}


def test_a_reference_finds_tiles_and_vectors_of_its_linears() -> None:
    linears = (
        LinearSpec("gate_proj", "mlp", "gate_up_proj", 64, 96),
        LinearSpec("up_proj", "mlp", "gate_up_proj", 64, 96),
    )
    tiles = TileMap(ModelSpec(2, linears, torch.float16), 4096)
    ref = WeightRef(1, "gate_up_proj", (0, 0, 0), CPU)
    ref.bind(tiles)
    assert [piece.out_offset for piece in ref.slices] == [0, 96]
    for piece, linear in zip(ref.slices, linears, strict=True):
        assert piece.column == tiles.column(1, linear.name)
        assert astuple(piece.a) == astuple(tiles.side(1, linear.name, "A"))
        assert astuple(piece.b) == astuple(tiles.side(1, linear.name, "B"))
        assert piece.mul is not None
        assert piece.add is not None
        assert astuple(piece.mul) == astuple(tiles.vector(1, linear.name, "mul"))
        assert astuple(piece.add) == astuple(tiles.vector(1, linear.name, "add"))
