"""`graft validate`: the same verdict as a server's, for people and for programs."""

import json
from pathlib import Path
from typing import Any

import helpers_peft as hp
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from sglang_graft.adapters import read_adapter
from sglang_graft.cli.app import app

RUN = CliRunner()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hp.tiny_config().to_dict()))
    return folder


@pytest.fixture
def good(tmp_path: Path) -> Path:
    folder = tmp_path / "good"
    hp.save_adapter(folder, r=8, lora_alpha=16, rank_pattern={"layers.1.self_attn.v_proj": 4})
    return folder


def run(*arguments: object) -> Result:
    return RUN.invoke(app, ["validate", *map(str, arguments)], env={"COLUMNS": "200"})


def report(*arguments: object) -> tuple[int, list[dict[str, Any]]]:
    result = run(*arguments, "--json")
    return result.exit_code, json.loads(result.stdout)["adapters"]


def test_what_is_applied_where(model: Path, good: Path) -> None:
    code, (verdict,) = report(good, "--model", model, "--dtype", "float32")
    assert code == 0
    assert verdict["refused"] is None
    assert verdict["identity"] == read_adapter(good, hp.tiny_spec()).identity
    assert verdict["linears"] == [
        {"name": "q_proj", "modules": 2, "layers": 2, "ranks": [8], "scales": [2.0]},
        {"name": "v_proj", "modules": 2, "layers": 2, "ranks": [4, 8], "scales": [2.0, 4.0]},
    ]
    assert verdict["modules"] == 4
    assert verdict["nbytes"] == 4 * (8 * (2 * 128 + 96) + 4 * 96)
    assert verdict["warnings"] == []


@pytest.mark.parametrize(("tokens", "pages"), [(16, 2), (8, 4), (64, 1)])
def test_pages_follow_the_page_size(tokens: int, pages: int, model: Path, good: Path) -> None:
    _, (verdict,) = report(good, "--model", model, "--dtype", "float32", "--page-size", tokens)
    # K and V of 2 layers, 2 heads of 16, 4 bytes each.
    assert verdict["base"]["page_bytes"] == tokens * 2 * 2 * 2 * 16 * 4
    assert verdict["base"]["page_tokens"] == tokens
    assert verdict["pages"] == pages


def test_the_dtype_is_the_models_own(model: Path, good: Path) -> None:
    def dtype() -> str:
        return str(report(good, "--model", model)[1][0]["base"]["dtype"])

    assert dtype() == "bfloat16"
    (model / "config.json").write_text(
        json.dumps(hp.tiny_config().to_dict() | {"dtype": "float16"})
    )
    assert dtype() == "float16"


def test_one_refused_among_good_ones(model: Path, good: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad[red]"
    hp.save_adapter(bad)
    hp.edit_config(bad, bias="all")
    code, verdicts = report(good, bad, tmp_path / "gone", "--model", model)
    assert code == 1
    assert [verdict["refused"] is None for verdict in verdicts] == [True, False, False]
    refused = verdicts[1]["refused"]
    assert (refused["file"], refused["item"]) == (str(bad / hp.CONFIG), "bias")
    assert verdicts[2]["refused"]["reason"] == "is not a folder"
    shown = run(good, bad, "--model", model)
    assert shown.exit_code == 1
    assert "refused" in shown.stdout
    assert "bad[red]" in shown.stdout
    assert "bias: wanted 'none', got 'all'" in " ".join(shown.stdout.split())
    assert "1 applied, 1 refused" in shown.stdout


def test_the_table_for_people(model: Path, good: Path) -> None:
    hp.edit_config(good, target_modules=["q_proj", "v_proj", "lost"])
    shown = run(good, "--model", model, "--dtype", "float32")
    text = " ".join(shown.stdout.split())
    assert shown.exit_code == 0
    assert "v_proj │ 2 of 2 │ 4, 8 │ 2, 4" in text
    assert "4 modules, 12800 bytes of weights" in text
    assert "warning target_modules: 'lost' matches no tensor of the file" in text


def test_the_model_that_the_adapter_names(model: Path, good: Path) -> None:
    hp.edit_config(good, base_model_name_or_path=str(model))
    code, (verdict,) = report(good)
    assert (code, verdict["base"]["path"]) == (0, str(model))
    hp.edit_config(good, base_model_name_or_path="somebody/a-model")
    code, (verdict,) = report(good)
    assert code == 1
    assert verdict["refused"]["item"] == "base_model_name_or_path"
    assert verdict["refused"]["reason"].endswith("pass the base model with --model")


def test_a_rank_above_the_servers_limit(model: Path, good: Path) -> None:
    code, (verdict,) = report(good, "--model", model, "--max-lora-rank", 4)
    assert code == 1
    assert "set --max-lora-rank" in verdict["refused"]["reason"]


def save_base(model: Path, adapter: Any, *, shards: bool = False) -> None:
    """Write the base weights below a PEFT model as a checkpoint, in one file or in two."""
    tensors = {
        name.replace(".base_layer", ""): tensor.clone()
        for name, tensor in adapter.base_model.model.state_dict().items()
        if "lora_" not in name
    }
    if not shards:
        hp.save_file(tensors, model / "model.safetensors")
        return
    names, index = sorted(tensors), {}
    for number in range(2):
        mine = {name: tensors[name] for name in names[number::2]}
        hp.save_file(mine, model / f"part-{number}.safetensors")
        index |= dict.fromkeys(mine, f"part-{number}.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_dora_with_and_without_base_weights(
    shards: bool, biased: bool, model: Path, tmp_path: Path
) -> None:
    adapter = hp.save_adapter(tmp_path / "dora", use_dora=True, r=8, attention_bias=biased)
    arguments = (tmp_path / "dora", "--model", model, "--dtype", "float32")
    code, (alone,) = report(*arguments)
    assert code == 0
    assert ["no weights of the base model" in text for text in alone["warnings"]] == [True]
    save_base(model, adapter, shards=shards)
    code, (whole,) = report(*arguments)
    assert code == 0
    assert whole["warnings"] == []
    assert whole["identity"] == alone["identity"]
    plain = 2 * 8 * (64 + 64 + 64 + 32) * 4
    assert alone["nbytes"] == plain + 2 * (64 + 32) * 4
    assert whole["nbytes"] == plain + 2 * (64 + 32) * 4 * (2 if biased else 1)


def test_C08_copies_are_compared_with_the_folder(model: Path, tmp_path: Path) -> None:
    adapter = hp.save_adapter(tmp_path / "a")
    save_base(model, adapter)
    head = adapter.base_model.model.lm_head.weight.detach()
    for copy, wanted in ((head.clone(), 0), (head + 1, 1)):
        name = "base_model.model.lm_head.base_layer.weight"
        hp.edit_tensors(tmp_path / "a", lambda t, name=name, copy=copy: t | {name: copy})
        code, (verdict,) = report(tmp_path / "a", "--model", model, "--dtype", "float32")
        assert code == wanted
    assert "differs from the base model" in verdict["refused"]["reason"]


def test_a_quantized_base_refuses_dora(model: Path, tmp_path: Path) -> None:
    adapter = hp.save_adapter(tmp_path / "dora", use_dora=True)
    save_base(model, adapter)
    tensors = hp.load_file(model / "model.safetensors")
    hp.save_file(
        {name: tensor.to(torch.int8) for name, tensor in tensors.items()},
        model / "model.safetensors",
    )
    code, (verdict,) = report(tmp_path / "dora", "--model", model)
    assert code == 1
    assert "is held as torch.int8" in verdict["refused"]["reason"]


def test_broken_base_weights_are_wrong_use(model: Path, good: Path) -> None:
    (model / "model.safetensors").write_bytes(b"junk")
    result = run(good, "--model", model)
    assert result.exit_code == 2
    assert "--model:" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/gone"], "--model: /gone/config.json: file: cannot be read"),
        (["--dtype", "int8"], "--dtype: wanted one of float16"),
    ],
)
def test_wrong_use_exits_with_2(
    arguments: list[str], message: str, model: Path, good: Path
) -> None:
    result = run(good, "--model", model, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 8}, "kv_lora_rank=8: not a dense Llama-shaped model"),
        ({"num_key_value_heads": 1}, "set --page-size to more tokens"),
    ],
)
def test_a_base_model_that_cannot_be_served(
    changes: dict[str, int], message: str, model: Path, good: Path
) -> None:
    (model / "config.json").write_text(json.dumps(hp.tiny_config().to_dict() | changes))
    result = run(good, "--model", model, "--page-size", 1)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_chat_template_that_cannot_be_compiled_is_refused(model: Path, good: Path) -> None:
    (good / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert report(good, "--model", model)[0] == 0
    (good / "chat_template.jinja").write_text("{% for %}")
    code, (verdict,) = report(good, "--model", model)
    assert code == 1
    assert verdict["refused"]["item"] == "chat_template"
