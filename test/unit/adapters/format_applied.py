"""Adapters that are applied: every one of them has to equal PEFT, delta by delta."""

import json
from pathlib import Path
from typing import Any

import helpers_peft as hp
import torch
from format_case import FormatCases
from safetensors.torch import save_file

from sglang_graft.adapters import ModelSpec

APPLIED = FormatCases()
case = APPLIED.case

PREFIX = "base_model.model."


def plain(id: str, feature: str, **lora: Any) -> None:
    """A case that is nothing but PEFT's own file."""
    case(id, feature)(lambda folder: hp.save_adapter(folder, **lora))


plain("plain", "LoRA on any subset of the linears", r=3, lora_alpha=5, target_modules=["down_proj"])
plain("all-linear", '`target_modules: "all-linear"`', r=1, target_modules="all-linear")
plain("rank-pattern", "`rank_pattern`", r=8, rank_pattern={"q_proj": 2})
plain(
    "alpha-pattern",
    "`alpha_pattern`, also by regular expression",
    alpha_pattern={"v_proj": 100, r"layers\.1\.self_attn\.q_proj": 3},
)
plain(
    "patterns-rslora",
    "Both patterns with `use_rslora`; the first key that matches wins",
    use_rslora=True,
    target_modules="all-linear",
    rank_pattern={r"model.layers.0.self_attn.(q|k)_proj": 3, "^model.layers.1.*up_proj": 17},
    alpha_pattern={r".*_proj": 12.5, "q_proj": 99},
)
plain("layers", "`layers_to_transform`", layers_to_transform=[1])
plain("gaussian", '`init_lora_weights: "gaussian"`', init_lora_weights="gaussian")
plain("orthogonal", '`init_lora_weights: "orthogonal"`', r=4, init_lora_weights="orthogonal")
plain("C01", "`use_rslora`", r=64, lora_alpha=16, use_rslora=True)
plain("C28", "`exclude_modules`", exclude_modules=["layers.0.self_attn.v_proj"])
plain("C31", "Part of a fused group (up without gate)", r=5, target_modules=["up_proj"])


PATTERNS: dict[str, Any] = {
    "target_modules": "all-linear",
    "use_rslora": True,
    "rank_pattern": {"up_proj": 3},
    "alpha_pattern": {"layers.1.*": 20},
}


@case(
    "dora",
    "DoRA (`use_dora`), also on linears with a bias",
    each={
        "plain": {},
        "odd": {"r": 5, "lora_alpha": 13, "target_modules": ["k_proj", "down_proj"]},
        "patterns": PATTERNS,
        "base-bias": {"attention_bias": True, "target_modules": ["q_proj", "k_proj", "o_proj"]},
    },
)
def dora(folder: Path, lora: dict[str, Any]) -> Any:
    return hp.save_adapter(folder, use_dora=True, **lora)


@case(
    "dora-names",
    "Every spelling of DoRA's magnitudes",
    each={"weight": ("", ".weight"), "adapter": (".a", ".a"), "both": (".a", ".a.weight")},
)
def dora_names(folder: Path, spelling: tuple[str, str]) -> Any:
    segment, magnitude = spelling
    model = hp.save_adapter(folder, use_dora=True)
    hp.edit_tensors(
        folder,
        lambda tensors: {
            name.replace(".weight", segment + ".weight").replace(
                "_vector", "_vector" + magnitude
            ): t
            for name, t in tensors.items()
        },
    )
    return model


@case(
    "lora-bias",
    "`lora_bias`, on linears with a bias of their own or without",
    each={
        "plain": {"r": 3, "lora_alpha": 7},
        "patterns": PATTERNS,
        "base-bias": {"attention_bias": True, "target_modules": ["q_proj", "v_proj", "o_proj"]},
    },
)
def lora_bias(folder: Path, lora: dict[str, Any]) -> Any:
    return hp.save_adapter(folder, lora_bias=True, **lora)


@case(
    "C04",
    "Pattern keys that match nothing (no effect, as in PEFT)",
    warnings=("alpha_pattern: key '^q_proj'", "alpha_pattern: key 'qproj'"),
)
def unused_keys(folder: Path) -> Any:
    return hp.save_adapter(folder, alpha_pattern={"^q_proj": 100, "qproj": 100, "v_proj": 3})


@case("C05", "New weights in the folder of an adapter that was read before")
def replaced(folder: Path) -> Any:
    hp.save_adapter(folder, r=8, target_modules="all-linear")
    return hp.save_adapter(folder, seed=1, r=8, rank_pattern={"q_proj": 2})


@case("C11", "`added_tokens.json` with tokens that the base model has")
def known_tokens(folder: Path) -> Any:
    (folder / "added_tokens.json").write_text(json.dumps({"<a>": 62, "<b>": 63}))
    return hp.save_adapter(folder)


@case("C14", "`adapter_model.bin` (weights-only loading), `target_modules` as one expression")
def bin_file(folder: Path) -> Any:
    model = hp.save_adapter(folder, target_modules=r".*self_attn\.[qv]_proj$")
    torch.save(hp.load_file(folder / hp.WEIGHTS), folder / "adapter_model.bin")
    (folder / hp.WEIGHTS).unlink()
    return model


@case(
    "C16",
    "Targets with a layer in them; a target that the model lacks is told",
    warnings=("target_modules: 'feed_forward.gate_proj' matches no tensor",),
)
def layer_targets(folder: Path) -> Any:
    targets = ["layers.1.mlp.down_proj", "feed_forward.gate_proj"]
    return hp.save_adapter(folder, target_modules=targets)


@case(
    "C17",
    "A regular expression inside a list of targets (matches nothing, as in PEFT)",
    warnings=("target_modules: '.*q_proj' matches no tensor",),
)
def expression_in_list(folder: Path) -> Any:
    return hp.save_adapter(folder, target_modules=[".*q_proj", "v_proj"])


@case(
    "C17",
    "Tensors that the config does not target (the file counts)",
    each={
        "list": {"target_modules": ["q_proj"]},
        "expression": {"target_modules": ".*q_proj"},
        "excluded": {"exclude_modules": ["v_proj"]},
        "layers": {"layers_to_transform": 7},
    },
    warnings=("has weights in the file; they are applied",),
)
def untargeted(folder: Path, changes: dict[str, Any]) -> Any:
    model = hp.save_adapter(folder)
    hp.edit_config(folder, **changes)
    return model


def rename(folder: Path, prefix: str, segment: str) -> None:
    hp.edit_tensors(
        folder,
        lambda tensors: {
            prefix + name.removeprefix(PREFIX).replace(".weight", segment + ".weight"): tensor
            for name, tensor in tensors.items()
        },
    )


@case("C20", "Tensor names without `base_model.model.`")
def no_prefix(folder: Path) -> Any:
    model = hp.save_adapter(folder)
    rename(folder, "", "")
    return model


@case(
    "C19",
    "Tensor names under the path that a wrapper of the same model gives its layers",
    each={
        "language-model": "base_model.model.model.language_model.",
        "language-model-first": "base_model.model.language_model.model.",
        "twice": "base_model.model.model.model.",
        "bare-stack": "base_model.model.",
        "nothing": "",
        "ddp": "base_model.model.module.model.",
        "compiled": "_orig_mod.base_model.model.model.",
    },
)
def other_prefix(folder: Path, prefix: str) -> Any:
    model = hp.save_adapter(folder, alpha_pattern={"layers.1.self_attn.v_proj": 5})
    hp.edit_tensors(
        folder,
        lambda tensors: {
            prefix + name.removeprefix(f"{PREFIX}model."): tensor
            for name, tensor in tensors.items()
        },
    )
    return model


@case("C08", "Copies of base weights (`base_layer`) that equal the base model's own")
def equal_copies(folder: Path) -> Any:
    model = hp.save_adapter(folder, attention_bias=True)
    base = model.base_model.model
    copies = {
        "lm_head.base_layer.weight": base.lm_head.weight,
        "model.embed_tokens.base_layer.weight": base.model.embed_tokens.weight,
        "model.layers.1.self_attn.q_proj.base_layer.weight": base.model.layers[
            1
        ].self_attn.q_proj.base_layer.weight,
        "model.layers.0.self_attn.k_proj.base_layer.bias": base.model.layers[
            0
        ].self_attn.k_proj.bias,
    }
    hp.edit_tensors(
        folder,
        lambda tensors: tensors | {PREFIX + n: t.detach().clone() for n, t in copies.items()},
    )
    return model


@case(
    "C22",
    "Tensor names with the adapter's name in them",
    each={
        "default": (PREFIX, ".default"),
        "lora": (PREFIX, ".lora"),
        "lora_B": (PREFIX, ".lora_B"),
        "bare": ("", ".default"),
    },
)
def adapter_segment(folder: Path, spelling: tuple[str, str]) -> Any:
    model = hp.save_adapter(folder)
    rename(folder, *spelling)
    return model


def fuse(model: Any, folder: Path, module: str, names: tuple[str, ...]) -> None:
    """Give the linears of each layer one A, and write them as the fused `module`."""
    layers, tensors = hp.lora_layers(model), {}
    for layer in range(2):
        parts = [layers[layer, name] for name in names]
        first = parts[0].lora_A["default"].weight.detach()
        for part in parts[1:]:
            part.lora_A["default"].weight.data.copy_(first)
        stacked: dict[str, list[torch.Tensor]] = {}
        for part in parts:
            for name, tensor in part.lora_B["default"].named_parameters():
                stacked.setdefault(f"lora_B.{name}", []).append(tensor.detach())
            if "default" in part.lora_magnitude_vector:
                magnitude = part.lora_magnitude_vector["default"].weight.detach()
                stacked.setdefault("lora_magnitude_vector", []).append(magnitude)
        path = f"{PREFIX}model.layers.{layer}.{module}"
        tensors[f"{path}.lora_A.weight"] = first.clone()
        tensors |= {f"{path}.{name}": torch.cat(values) for name, values in stacked.items()}
    save_file(tensors, folder / hp.WEIGHTS)
    hp.edit_config(folder, target_modules=[module.split(".")[1]])


QKV = ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"))
GATE_UP = ("mlp.gate_up_proj", ("gate_proj", "up_proj"))


@case(
    "C29",
    "Fused `qkv_proj` and `gate_up_proj` tensors (one A, stacked B)",
    each={"qkv": QKV, "gate_up": GATE_UP},
)
def fused(folder: Path, group: tuple[str, tuple[str, ...]]) -> Any:
    model = hp.save_adapter(folder, target_modules=list(group[1]))
    fuse(model, folder, *group)
    return model


@case(
    "C29",
    "Fused tensors with DoRA or `lora_bias`",
    each={
        "dora-qkv": (QKV, {"use_dora": True, "attention_bias": True}),
        "dora-gate_up": (GATE_UP, {"use_dora": True}),
        "bias-qkv": (QKV, {"lora_bias": True}),
    },
)
def fused_vectors(folder: Path, variant: tuple[tuple[str, tuple[str, ...]], dict[str, Any]]) -> Any:
    group, lora = variant
    model = hp.save_adapter(folder, target_modules=list(group[1]), **lora)
    fuse(model, folder, *group)
    return model


def half_spec() -> ModelSpec:
    return hp.tiny_spec(torch.bfloat16)


@case(
    "C32",
    "float16, bfloat16 and float32 files, cast once to the base model's dtype",
    each={"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32},
    spec=half_spec,
)
def stored_dtype(folder: Path, stored: torch.dtype) -> Any:
    model = hp.save_adapter(folder)
    hp.edit_tensors(folder, lambda tensors: {n: t.to(stored) for n, t in tensors.items()})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(stored).to(torch.bfloat16))
    return model


@case(
    "C32",
    "DoRA and `lora_bias` files of each dtype",
    each={
        f"{kind}-{name}": ({flag: True}, dtype)
        for kind, flag in (("dora", "use_dora"), ("bias", "lora_bias"))
        for name, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16))
    },
    spec=half_spec,
)
def stored_vectors(folder: Path, variant: tuple[dict[str, Any], torch.dtype]) -> Any:
    lora, dtype = variant
    model = hp.save_adapter(folder, **lora)
    hp.edit_tensors(folder, lambda tensors: {n: t.to(dtype) for n, t in tensors.items()})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = parameter.to(dtype)
            # Magnitudes and biases are not cast to the model's dtype, in PEFT neither.
            kept = "magnitude" in name or name.endswith(".bias")
            parameter.copy_(stored if kept else stored.to(torch.bfloat16))
    return model


@case(
    "C37",
    "`base_model_name_or_path`: never fetched, never judged",
    each={"missing": ..., "null": None, "gone": "/gone/dir", "private": "some-private/model"},
)
def base_name(folder: Path, name: Any) -> Any:
    model = hp.save_adapter(folder)
    keys = json.loads((folder / hp.CONFIG).read_text()) | {"base_model_name_or_path": name}
    if name is ...:
        del keys["base_model_name_or_path"]
    (folder / hp.CONFIG).write_text(json.dumps(keys))
    return model


@case("C40", "A rank and modules larger than those of every adapter before")
def larger(folder: Path) -> Any:
    return hp.save_adapter(folder, r=64, target_modules="all-linear")


@case(
    "C41",
    "Ranks from 1 to 64, odd ones too",
    each={f"r{rank}": rank for rank in (1, 2, 3, 5, 8, 12, 31, 32, 33, 64)},
)
def rank(folder: Path, rank: int) -> Any:
    return hp.save_adapter(folder, r=rank, lora_alpha=7)
