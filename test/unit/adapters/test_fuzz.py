"""Whatever lies in a folder: it is applied as PEFT applies it, or AdapterError is raised.

GRAFT_FUZZ_EXAMPLES sets the number of examples of each test (10000 in a long run).
"""

import json
import os
import tempfile
from pathlib import Path

import fuzz_examples as fuzz
import helpers_peft as hp
import peft
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from sglang_graft.adapters import Adapter, AdapterError, read_adapter

# Read at import: the fixture that cleans the environment runs later.
EXAMPLES = int(os.environ.get("GRAFT_FUZZ_EXAMPLES", "100"))
PROFILE = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)

# PEFT and `re` say the same of strange patterns as we do, in their own words.
pytestmark = [
    pytest.mark.timeout(900 + EXAMPLES),
    pytest.mark.filterwarnings("ignore:The following (alpha|rank)_pattern keys"),
    pytest.mark.filterwarnings("ignore:Possible nested set"),
]


def applied(folder: Path) -> Adapter | None:
    """The adapter, or None when it is refused; any other exception is the test's failure."""
    try:
        return read_adapter(folder, fuzz.SPEC)
    except AdapterError as error:
        message = str(error)
    assert message.isprintable()
    return None


def assert_equals_peft(adapter: Adapter, folder: Path) -> None:
    """Load the folder into PEFT under the names that PEFT itself would have used."""
    named = {}
    for name, tensor in fuzz.read_tensors(folder).items():
        path, _, rest = name.removeprefix(fuzz.PREFIX).partition(".lora_")
        named[f"{fuzz.PREFIX}{path}.lora_{rest[0]}.weight"] = tensor.float()
    paths = sorted({name.removeprefix(fuzz.PREFIX).split(".lora_")[0] for name in named})
    config = json.loads((folder / hp.CONFIG).read_text())
    model = fuzz.peft_model(config, paths)
    assert peft.set_peft_model_state_dict(model, named).unexpected_keys == []
    layers = hp.lora_layers(model)
    assert adapter.deltas.keys() == layers.keys()
    for where, delta in adapter.deltas.items():
        assert delta.scale == layers[where].scaling["default"]
        assert delta.rank == layers[where].r["default"]
        wanted = layers[where].get_delta_weight("default").detach()
        torch.testing.assert_close(delta.scale * (delta.b @ delta.a), wanted, rtol=1e-4, atol=1e-6)


@PROFILE
@given(data=st.data())
def test_right_adapters_are_applied(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data.draw(fuzz.right_folders(folder))
        assert_equals_peft(read_adapter(folder, fuzz.SPEC), folder)


@PROFILE
@given(data=st.data())
def test_damaged_adapters_are_applied_as_by_peft_or_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data.draw(fuzz.right_folders(folder))
        data.draw(fuzz.damage(folder))
        adapter = applied(folder)
        event("refused" if adapter is None else "applied")
        if adapter is not None:
            assert_equals_peft(adapter, folder)


@PROFILE
@given(data=st.data())
def test_broken_bytes_never_crash(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data.draw(fuzz.right_folders(folder))
        file = data.draw(st.sampled_from(sorted(folder.iterdir())))
        content = file.read_bytes()
        ways = [fuzz.broken, fuzz.broken_programs] if file.name == fuzz.BIN else [fuzz.broken]
        file.write_bytes(data.draw(data.draw(st.sampled_from(ways))(content)))
        applied(folder)
