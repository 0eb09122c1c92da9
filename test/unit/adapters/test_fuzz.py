"""Whatever lies in a folder: it is applied as PEFT applies it, or AdapterError is raised.

GRAFT_FUZZ_EXAMPLES sets the number of examples of the three tests together.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import fuzz_examples as fuzz
import fuzz_model
import helpers_peft as hp
import peft
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from sglang_graft.adapters import Adapter, AdapterError, Delta, read_adapter

# Read at import: the fixture that cleans the environment runs later.
EXAMPLES = int(os.environ.get("GRAFT_FUZZ_EXAMPLES", "10000"))


def profile(share: float) -> settings:
    return settings(
        max_examples=max(1, int(EXAMPLES * share)),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


# PEFT and `re` say the same of strange patterns as we do, in their own words.
pytestmark = [
    pytest.mark.timeout(900 + EXAMPLES),
    pytest.mark.filterwarnings("ignore:The following (alpha|rank)_pattern keys"),
    pytest.mark.filterwarnings("ignore:Possible nested set"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but"),
]

PLACE = re.compile(
    r"(?:(?P<before>.*)\.)?layers\.(?P<layer>\d+)\.(?P<module>.+?)"
    r"\.lora_(?P<part>A|B|magnitude_vector)(?P<end>.*)"
)
# What may stand before the layers of the decoder; the examples have other words too.
WRAPPERS = {"base_model", "model", "language_model"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples: making and removing one for each takes longer than the rest."""
    return tmp_path_factory.mktemp("fuzz")


def emptied(folder: Path) -> Path:
    for file in folder.iterdir():
        file.unlink()
    return folder


def applied(folder: Path) -> Adapter | None:
    """The adapter, or None when it is refused; any other exception is the test's failure."""
    try:
        return read_adapter(folder, fuzz_model.SPEC, fuzz_model.base_weight)
    except AdapterError as error:
        message = str(error)
    assert message.isprintable()
    return None


def assert_equals_peft(adapter: Adapter, folder: Path) -> None:
    """Load the folder into PEFT under the names that PEFT itself would have used."""
    named, paths = {}, set()
    for name, tensor in fuzz.read_tensors(folder).items():
        if ".base_layer." in name and ".lora_" not in name:
            continue  # applied or not, the result is the same: that is checked below
        place = PLACE.fullmatch(name)
        assert place is not None, name
        assert set((place["before"] or "model").split(".")) <= WRAPPERS, name
        path = f"model.layers.{place['layer']}.{place['module']}"
        ends = {"A": "lora_A.weight", "magnitude_vector": "lora_magnitude_vector"}
        end = ends.get(place["part"])
        end = end or ("lora_B.bias" if place["end"].endswith("bias") else "lora_B.weight")
        named[f"{fuzz.PREFIX}{path}.{end}"] = tensor.float()
        paths.add(path)
    config = json.loads((folder / hp.CONFIG).read_text())
    model = fuzz_model.peft_model(config, sorted(paths))
    loaded = peft.set_peft_model_state_dict(model, named)
    assert loaded.unexpected_keys == []
    assert not [name for name in loaded.missing_keys if "lora_" in name]
    layers = hp.lora_layers(model)
    assert adapter.deltas.keys() == layers.keys()
    for where, delta in adapter.deltas.items():
        assert delta.scale == layers[where].scaling["default"]
        assert delta.rank == layers[where].r["default"]
        assert_layer(delta, layers[where])


def assert_copies_are_equal(folder: Path) -> None:
    for name, tensor in fuzz.read_tensors(folder).items():
        path, found, kind = name.removeprefix(fuzz.PREFIX).partition(".base_layer.")
        if found and ".lora_" not in name:
            path = re.sub(r".*layers\.", "model.layers.", f".{path}")
            assert torch.equal(tensor.float(), fuzz_model.BASE[path][kind == "bias"])


@torch.no_grad()
def assert_layer(delta: Delta, layer: Any) -> None:
    """The outputs of one linear, base weights and all."""
    x = fuzz_model.INPUTS[delta.a.shape[1]]
    base, added = layer.base_layer(x), x @ delta.a.T @ delta.b.T * delta.scale
    found = base + added
    found = found if delta.mul is None else found * delta.mul
    found = found if delta.add is None else found + delta.add
    wanted = layer(x)
    # What the largest term rounds to is lost in the sum, in either order of it.
    largest = max(float(part.abs().max()) for part in (base, added, wanted))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * largest)


@profile(0.3)
@given(data=st.data())
def test_right_adapters_are_applied(data: st.DataObject, place: Path) -> None:
    folder = emptied(place)
    data.draw(fuzz.right_folders(folder))
    adapter = read_adapter(folder, fuzz_model.SPEC, fuzz_model.base_weight)
    assert_equals_peft(adapter, folder)


@profile(0.5)
@given(data=st.data())
def test_damaged_adapters_are_applied_as_by_peft_or_refused(
    data: st.DataObject, place: Path
) -> None:
    folder = emptied(place)
    data.draw(fuzz.right_folders(folder))
    data.draw(fuzz.damage(folder))
    adapter = applied(folder)
    event("refused" if adapter is None else "applied")
    if adapter is not None:
        assert_equals_peft(adapter, folder)
        assert_copies_are_equal(folder)


@profile(0.2)
@given(data=st.data())
def test_broken_bytes_never_crash(data: st.DataObject, place: Path) -> None:
    folder = emptied(place)
    data.draw(fuzz.right_folders(folder))
    file = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = file.read_bytes()
    ways = [fuzz.broken, fuzz.broken_programs] if file.name == fuzz.BIN else [fuzz.broken]
    file.write_bytes(data.draw(data.draw(st.sampled_from(ways))(content)))
    applied(folder)
