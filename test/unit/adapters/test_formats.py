"""Every row of the format table: equal to PEFT down to the pointer table, or refused by name."""

from pathlib import Path

import pytest
import torch
from format_case import FormatCase
from format_table import CASES, ROWS
from helpers_adapters import random_adapter
from helpers_peft import lora_layers

from sglang_graft.adapters import Adapter, AdapterError, PointerTable, TileMap, pack, read_adapter

APPLIED = [pytest.param(case, id=case.test_id) for case in CASES if case.refused is None]
REFUSED = [pytest.param(case, id=case.test_id) for case in CASES if case.refused is not None]
PAGE_BYTES = 8192
MAX_RANK = 64


def test_every_row_has_its_case() -> None:
    assert set(ROWS) <= {case.id for case in CASES}
    ids = [case.test_id for case in CASES]
    assert len(set(ids)) == len(ids)


def equals_peft(adapter: Adapter, model) -> None:
    layers = lora_layers(model)
    assert adapter.deltas.keys() == layers.keys()
    for where, delta in adapter.deltas.items():
        assert delta.scale == layers[where].scaling["default"]
        assert delta.rank == layers[where].r["default"] == delta.a.shape[0] == delta.b.shape[1]
        wanted = layers[where].get_delta_weight("default").detach()
        found = delta.scale * (delta.b.to(wanted.dtype) @ delta.a.to(wanted.dtype))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def served_as_peft(adapter: Adapter, model, case: FormatCase) -> None:
    """Ranks and scales in a slot that another adapter, touching everything, held before."""
    tiles = TileMap(case.spec(), PAGE_BYTES, max_rank=MAX_RANK)
    table = PointerTable(2, tiles, "cpu")
    everywhere = {(layer, linear.name): 9 for layer in range(2) for linear in tiles.spec.linears}
    for image in (pack(random_adapter(tiles.spec, everywhere), tiles), pack(adapter, tiles)):
        table.set(1, image, list(range(1, image.pages.shape[0] + 1)), 1 << 40, PAGE_BYTES)
    table.check_invariants()
    ranks, scales = torch.zeros_like(table.ranks[1]), torch.zeros_like(table.scales[1])
    for (layer, name), module in lora_layers(model).items():
        ranks[tiles.column(layer, name)] = module.r["default"]
        scales[tiles.column(layer, name)] = module.scaling["default"]
    assert torch.equal(table.ranks[1], ranks)
    assert torch.equal(table.scales[1], scales)


@pytest.mark.filterwarnings("ignore:The following (alpha|rank)_pattern keys")
@pytest.mark.parametrize("case", APPLIED)
def test_applied(case: FormatCase, tmp_path: Path) -> None:
    model = case.make(tmp_path)
    adapter = read_adapter(tmp_path, case.spec())
    equals_peft(adapter, model)
    served_as_peft(adapter, model, case)
    assert len(adapter.warnings) == len(case.warnings)
    for part, warning in zip(case.warnings, adapter.warnings, strict=True):
        assert part in warning


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: FormatCase, tmp_path: Path) -> None:
    case.make(tmp_path)
    with pytest.raises(AdapterError) as caught:
        pack(
            read_adapter(tmp_path, case.spec()), TileMap(case.spec(), PAGE_BYTES, max_rank=MAX_RANK)
        )
    assert case.refused is not None
    assert case.refused in str(caught.value)
