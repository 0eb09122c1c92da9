"""Every row of the format table: equal to PEFT down to the served result, or refused by name."""

from dataclasses import astuple
from pathlib import Path
from typing import Any

import helpers_peft as hp
import pytest
import torch
from format_case import FormatCase
from format_table import CASES, ROWS
from helpers_adapters import random_adapter
from helpers_peft import lora_layers

from graft_kernels.sgmv import Group, Side, Slice, Vector, Weights, sgmv
from sglang_graft.adapters import (
    Adapter,
    AdapterError,
    Delta,
    PointerTable,
    TileMap,
    pack,
    read_adapter,
)

APPLIED = [pytest.param(case, id=case.test_id) for case in CASES if case.refused is None]
REFUSED = [pytest.param(case, id=case.test_id) for case in CASES if case.refused is not None]
PAGE_BYTES = 8192
MAX_RANK = 64


def test_every_row_has_its_case() -> None:
    assert set(ROWS) <= {case.id for case in CASES}
    ids = [case.test_id for case in CASES]
    assert len(set(ids)) == len(ids)


@torch.no_grad()
def equals_peft(adapter: Adapter, model) -> None:
    layers = lora_layers(model)
    assert adapter.deltas.keys() == layers.keys()
    for where, delta in adapter.deltas.items():
        assert delta.scale == layers[where].scaling["default"]
        assert delta.rank == layers[where].r["default"] == delta.a.shape[0] == delta.b.shape[1]
        wanted = layers[where].get_delta_weight("default").detach()
        found = delta.scale * (delta.b.to(wanted.dtype) @ delta.a.to(wanted.dtype))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
        x = torch.randn(3, delta.a.shape[1])
        layer = layers[where]
        torch.testing.assert_close(applied(delta, layer, x), layer(x), rtol=1e-5, atol=1e-5)


def applied(delta: Delta, module: Any, x: torch.Tensor) -> torch.Tensor:
    """The outputs of one linear by the definition of Delta."""
    y = module.base_layer(x) + x @ delta.a.float().T @ delta.b.float().T * delta.scale
    y = y if delta.mul is None else y * delta.mul
    return y if delta.add is None else y + delta.add


def slice_of(tiles: TileMap, layer: int, name: str) -> Slice:
    side_a, side_b = (Side(*astuple(tiles.side(layer, name, side))) for side in "AB")
    mul, add = (Vector(*astuple(tiles.vector(layer, name, kind))) for kind in ("mul", "add"))
    return Slice(side_a, side_b, tiles.column(layer, name), 0, mul, add)


@torch.no_grad()
def served_as_peft(adapter: Adapter, model, case: FormatCase) -> None:
    """Every linear through arena and kernel, in a slot that held another adapter before.

    Linears that PEFT leaves alone keep their bits.
    """
    tiles = TileMap(case.spec(), PAGE_BYTES, max_rank=MAX_RANK)
    table = PointerTable(2, tiles, "cpu")
    everywhere = {(layer, linear.name): 9 for layer in range(2) for linear in tiles.spec.linears}
    other = random_adapter(tiles.spec, everywhere, vectors="mul add")
    for image in (pack(other, tiles), pack(adapter, tiles)):
        arena = torch.cat([torch.full((1, PAGE_BYTES), 255, dtype=torch.uint8), image.pages])
        pages = list(range(1, len(arena)))
        table.set(1, image, pages, arena.data_ptr(), PAGE_BYTES)
        table.check_invariants()
    weights = Weights(table.addresses, table.ranks, table.scales, arena.flatten(), tiles.spec.dtype)
    layers = lora_layers(model)
    for layer, linear in ((i, linear) for i in range(2) for linear in tiles.spec.linears):
        x = torch.randn(3, linear.in_features)
        module = layers.get((layer, linear.name))
        before = torch.randn(3, linear.out_features) if module is None else module.base_layer(x)
        wanted = before if module is None else module(x)
        where = [slice_of(tiles, layer, linear.name)]
        found = sgmv(x, where, [Group(1, slice(0, 3))], weights, before.clone())
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert module is not None or torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore:The following (alpha|rank)_pattern keys")
@pytest.mark.parametrize("case", APPLIED)
def test_applied(case: FormatCase, tmp_path: Path) -> None:
    model = case.make(tmp_path)
    adapter = read_adapter(tmp_path, case.spec(), hp.base_weight(model))
    equals_peft(adapter, model)
    served_as_peft(adapter, model, case)
    assert len(adapter.warnings) == len(case.warnings)
    for part, warning in zip(case.warnings, adapter.warnings, strict=True):
        assert part in warning


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: FormatCase, tmp_path: Path) -> None:
    model = case.make(tmp_path)
    base = None if model is None else hp.base_weight(model)
    tiles = TileMap(case.spec(), PAGE_BYTES, max_rank=MAX_RANK)
    with pytest.raises(AdapterError) as caught:
        pack(read_adapter(tmp_path, tiles.spec, base), tiles)
    assert case.refused is not None
    assert case.refused in str(caught.value)
