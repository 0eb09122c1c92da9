"""Adapters that PEFT wrote must come out with PEFT's own deltas and scales."""

from pathlib import Path

import helpers_peft as hp
import pytest
import torch

from sglang_graft.adapters import Adapter, read_adapter

F32 = torch.float32


def assert_equals_peft(adapter: Adapter, model) -> None:
    layers = hp.lora_layers(model)
    assert adapter.deltas.keys() == layers.keys()
    for where, delta in adapter.deltas.items():
        assert delta.scale == layers[where].scaling["default"]
        assert delta.rank == layers[where].r["default"] == delta.a.shape[0] == delta.b.shape[1]
        wanted = layers[where].get_delta_weight("default").detach()
        torch.testing.assert_close(delta.scale * (delta.b @ delta.a), wanted, rtol=0, atol=1e-7)


CASES = {
    "q only": dict(r=4, target_modules=["q_proj"]),
    "q and v": dict(r=8, lora_alpha=16),
    "down only": dict(r=3, lora_alpha=5, target_modules=["down_proj"]),
    "up without gate": dict(r=5, target_modules=["up_proj"]),
    "all linear": dict(r=1, lora_alpha=7, target_modules="all-linear"),
    "regex targets": dict(r=2, target_modules=r".*self_attn\.[qv]_proj$"),
    "rslora": dict(r=64, lora_alpha=16, use_rslora=True),
    "rank pattern": dict(r=8, rank_pattern={"q_proj": 2}),
    "alpha pattern": dict(r=8, alpha_pattern={"v_proj": 100, r"layers\.1\.self_attn\.q_proj": 3}),
    "both, rslora": dict(
        r=8,
        use_rslora=True,
        target_modules="all-linear",
        rank_pattern={r"model.layers.0.self_attn.(q|k)_proj": 3, "^model.layers.1.*up_proj": 17},
        alpha_pattern={r".*_proj": 12.5, "q_proj": 99},
    ),
    "one layer": dict(r=4, layers_to_transform=[1]),
    "excluded": dict(r=4, exclude_modules=["layers.0.self_attn.v_proj"]),
    "layer in target": dict(r=4, target_modules=["layers.1.mlp.down_proj"]),
    "gaussian start": dict(r=4, init_lora_weights="gaussian"),
    "orthogonal start": dict(r=4, init_lora_weights="orthogonal"),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_peft(case: str, tmp_path: Path) -> None:
    model = hp.save_adapter(tmp_path, **CASES[case])
    adapter = read_adapter(tmp_path, hp.tiny_spec())
    assert_equals_peft(adapter, model)
    assert adapter.warnings == ()


@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys")
def test_a_pattern_key_that_matches_nothing_is_told(tmp_path: Path) -> None:
    model = hp.save_adapter(tmp_path, alpha_pattern={"^q_proj": 100, "qproj": 100, "v_proj": 3})
    adapter = read_adapter(tmp_path, hp.tiny_spec())
    assert_equals_peft(adapter, model)
    assert [warning.split("'")[1] for warning in adapter.warnings] == ["^q_proj", "qproj"]
    assert adapter.warnings[0] == (
        "alpha_pattern: key '^q_proj' matches no module of the adapter and has no effect"
    )


def test_a_target_without_tensors_is_told(tmp_path: Path) -> None:
    hp.save_adapter(tmp_path)
    hp.edit_config(tmp_path, target_modules=["q_proj", "v_proj", ".*k_proj"])
    (warning,) = read_adapter(tmp_path, hp.tiny_spec()).warnings
    assert warning == "target_modules: '.*k_proj' matches no tensor of the file"


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ".*q_proj"},
        {"exclude_modules": ["v_proj"]},
        {"layers_to_transform": 7},
    ],
)
def test_tensors_that_the_config_does_not_target_are_applied_and_told(changes, tmp_path) -> None:
    model = hp.save_adapter(tmp_path)
    hp.edit_config(tmp_path, **changes)
    adapter = read_adapter(tmp_path, hp.tiny_spec())
    assert_equals_peft(adapter, model)
    assert adapter.warnings[-1].endswith("has weights in the file; they are applied")


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("served", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_cast_once(stored: torch.dtype, served: torch.dtype, tmp_path: Path) -> None:
    hp.save_adapter(tmp_path)
    saved: hp.Tensors = {}

    def cast(tensors: hp.Tensors) -> hp.Tensors:
        saved.update({name: tensor.to(stored) for name, tensor in tensors.items()})
        return saved

    hp.edit_tensors(tmp_path, cast)
    delta = read_adapter(tmp_path, hp.tiny_spec(served)).deltas[1, "q_proj"]
    assert torch.equal(delta.a, saved[hp.key(1, "self_attn.q_proj", "A")].to(served))
    assert torch.equal(delta.b, saved[hp.key(1, "self_attn.q_proj", "B")].to(served))


def test_weights_outlive_the_file(tmp_path: Path) -> None:
    hp.save_adapter(tmp_path)
    delta = read_adapter(tmp_path, hp.tiny_spec()).deltas[0, "q_proj"]
    before = delta.a.clone()
    with (tmp_path / hp.WEIGHTS).open("r+b") as file:
        file.truncate(0)
    assert torch.equal(delta.a, before)


@pytest.mark.parametrize("segment", ["", ".default", ".lora", ".lora_B"])
@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_spellings_of_the_same_names(prefix: str, segment: str, tmp_path: Path) -> None:
    hp.save_adapter(tmp_path)
    wanted = read_adapter(tmp_path, hp.tiny_spec()).identity

    def rename(tensors: hp.Tensors) -> hp.Tensors:
        return {
            prefix
            + name.removeprefix("base_model.model.").replace(".weight", segment + ".weight"): t
            for name, t in tensors.items()
        }

    hp.edit_tensors(tmp_path, rename)
    assert read_adapter(tmp_path, hp.tiny_spec()).identity == wanted


def test_missing_modules_are_no_delta(tmp_path: Path) -> None:
    hp.save_adapter(tmp_path)

    def drop(tensors: hp.Tensors) -> None:
        for side in "AB":
            del tensors[hp.key(0, "self_attn.v_proj", side)]

    hp.edit_tensors(tmp_path, drop)
    deltas = read_adapter(tmp_path, hp.tiny_spec()).deltas
    assert list(deltas) == [(0, "q_proj"), (1, "q_proj"), (1, "v_proj")]


@pytest.mark.parametrize("base", [None, "/gone/dir", "some-private/model"])
def test_the_base_model_name_is_not_judged(base: str | None, tmp_path: Path) -> None:
    hp.save_adapter(tmp_path)
    hp.edit_config(tmp_path, base_model_name_or_path=base)
    assert read_adapter(tmp_path, hp.tiny_spec()).deltas


def test_missing_config_keys_have_peft_defaults(tmp_path: Path) -> None:
    model = hp.save_adapter(tmp_path, r=8, lora_alpha=8)
    (tmp_path / hp.CONFIG).write_text('{"peft_type": "LORA"}')
    assert_equals_peft(read_adapter(tmp_path, hp.tiny_spec()), model)


def test_only_new_tokens_count(tmp_path: Path) -> None:
    hp.save_adapter(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<a>": 62, "<b>": 63}')
    assert read_adapter(tmp_path, hp.tiny_spec()).deltas
