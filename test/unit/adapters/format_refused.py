"""Adapters that are refused as a whole, with what is wrong in the message."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers_peft as hp
import torch
from format_case import FormatCases

from sglang_graft.adapters import ModelSpec

REFUSED = FormatCases()
case = REFUSED.case

LAYER = "base_model.model.model.layers.0"


def by_key(id: str, feature: str, key: str, value: Any, refused: str) -> None:
    """A case that is a good adapter but for one key of its config."""

    def make(folder: Path) -> None:
        hp.save_adapter(folder)
        hp.edit_config(folder, **{key: value})

    case(id, feature, refused=f"{key}: {refused}")(make)


def by_tensors(folder: Path, *names: str) -> None:
    """A good adapter with further tensors."""
    hp.save_adapter(folder)
    hp.edit_tensors(folder, lambda tensors: tensors | {name: torch.ones(8, 64) for name in names})


by_key("C25", '`bias: "all"`', "bias", "all", "wanted 'none', got 'all'")
by_key("bias", '`bias: "lora_only"`', "bias", "lora_only", "wanted 'none', got 'lora_only'")
OFF = "wanted it off, got "
for id, feature, key, value, why in (
    ("C26", "`fan_in_fan_out` (Conv1D, as in GPT-2)", "fan_in_fan_out", True, "transposed base"),
    (
        "C43",
        "`target_parameters` (fused experts)",
        "target_parameters",
        ["mlp.experts.gate_up_proj"],
        "LoRA on bare parameters (fused experts)",
    ),
    ("tokens", "`trainable_token_indices`", "trainable_token_indices", [1], "changed token"),
    ("replication", "`layer_replication`", "layer_replication", [[0, 2]], "a rebuilt layer stack"),
    ("qalora", "QALoRA", "use_qalora", True, "QALoRA pools the inputs"),
    ("megatron", "Megatron layers", "megatron_config", {"a": 1}, "Megatron"),
    ("alora", "Activated LoRA", "alora_invocation_tokens", [5], "activated LoRA"),
    ("bdlora", "Block-diagonal LoRA", "use_bdlora", {"nblocks": 2}, "block-diagonal"),
    ("arrow", "Arrow routing", "arrow_config", {"top_k": 2}, "routing"),
    ("kasa", "KaSA", "kasa_config", {"beta": 1.0}, "KaSA"),
    ("monteclora", "Monte Carlo LoRA", "monteclora_config", {"n": 1}, "Monte Carlo"),
    ("velora", "VeLoRA", "velora_config", {"num_groups": 1}, "VeLoRA"),
    ("unknown-key", "A config key that we do not know", "use_x_of_2030", True, "not a key that we"),
):
    by_key(id, feature, key, value, f"{OFF}{value!r}: {why}")
for init in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"):
    by_key(
        init.replace("_", "-"),
        f"`init_lora_weights: {json.dumps(init)}` (relative to a changed base model)",
        "init_lora_weights",
        init,
        f"got {init!r}: the weights are relative to a changed base model",
    )
for kind in ("IA3", "LOHA", "PROMPT_TUNING"):
    by_key(kind.lower(), f"`peft_type: {kind}`", "peft_type", kind, f"wanted 'LORA', got '{kind}'")


def without(folder: Path, part: str) -> None:
    """Take one tensor out whose name has `part` in it."""

    def drop(tensors: hp.Tensors) -> None:
        del tensors[next(name for name in sorted(tensors) if part in name)]

    hp.edit_tensors(folder, drop)


@case(
    "dora-parts",
    "DoRA with a magnitude missing, or magnitudes without `use_dora`",
    each={"missing": False, "flag": True},
    refused="lora_magnitude_vector",
)
def dora_parts(folder: Path, flag: bool) -> None:
    hp.save_adapter(folder, use_dora=True)
    if flag:
        hp.edit_config(folder, use_dora=False)
    else:
        without(folder, "layers.1.self_attn.v_proj.lora_magnitude_vector")


@case("dora-zero", "DoRA on a row of weights that is zero", refused="divides by a row")
def dora_zero(folder: Path) -> Any:
    model = hp.save_adapter(folder, use_dora=True)
    layer = hp.lora_layers(model)[0, "q_proj"]
    layer.base_layer.weight.data[3] = 0

    def clear(tensors: hp.Tensors) -> None:
        tensors[hp.key(0, "self_attn.q_proj", "B")][3] = 0

    hp.edit_tensors(folder, clear)
    return model


@case("dora-bias", "DoRA together with `lora_bias`", refused="lora_bias: wanted it off beside")
def dora_with_bias(folder: Path) -> None:
    hp.save_adapter(folder, use_dora=True)
    hp.edit_config(folder, lora_bias=True)


@case(
    "lora-bias-parts",
    "`lora_bias` with a bias missing, or biases without it",
    each={"missing": False, "flag": True},
    refused="lora_B.bias",
)
def lora_bias_parts(folder: Path, flag: bool) -> None:
    hp.save_adapter(folder)
    biases = {
        hp.key(layer, f"self_attn.{name}", "B").replace("weight", "bias"): torch.ones(size)
        for layer in range(2)
        for name, size in (("q_proj", 64), ("v_proj", 32))
    }
    hp.edit_tensors(folder, lambda tensors: tensors | biases)
    if not flag:
        hp.edit_config(folder, lora_bias=True)
        without(folder, "layers.1.self_attn.v_proj.lora_B.bias")


@case(
    "vector-shape",
    "Magnitudes or biases of a wrong shape",
    each={"dora": torch.ones(64, 1), "short": torch.ones(63)},
    refused="q_proj.lora_magnitude_vector: wanted shape [64] for this base model, got [6",
)
def vector_shape(folder: Path, wrong: torch.Tensor) -> None:
    hp.save_adapter(folder, use_dora=True)
    name = f"{LAYER}.self_attn.q_proj.lora_magnitude_vector"
    hp.edit_tensors(folder, lambda tensors: tensors | {name: wrong})


@case("embedding", "LoRA on `embed_tokens`", refused="lora_embedding_A: LoRA on embeddings")
def embedding(folder: Path) -> None:
    name = "base_model.model.model.embed_tokens.lora_embedding_"
    by_tensors(folder, name + "A", name + "B")


@case("C02", "`use_rslora` on experts", refused="LoRA on experts is not supported")
def rslora_experts(folder: Path) -> None:
    names = [f"{LAYER}.mlp.experts.1.up_proj.lora_{side}.weight" for side in "AB"]
    by_tensors(folder, *names)
    hp.edit_config(folder, use_rslora=True, target_modules=["q_proj", "v_proj", "up_proj"])


@case("C44", "LoRA on each expert", refused="LoRA on experts is not supported")
def experts(folder: Path) -> None:
    by_tensors(folder, f"{LAYER}.mlp.experts.0.gate_proj.lora_A.weight")


@case("C07", "`modules_to_save`", refused="modules_to_save: wanted it off", variant="config")
def modules_to_save(folder: Path) -> None:
    by_tensors(folder, "base_model.model.lm_head.weight")
    hp.edit_config(folder, modules_to_save=["lm_head", "embed_tokens"])


@case(
    "C07",
    "Full copies of `lm_head`, `embed_tokens` or a task head",
    each={
        "lm_head": "lm_head.weight",
        "embed_tokens": "model.embed_tokens.weight",
        "score": "score.modules_to_save.default.weight",
    },
    refused="not supported",
)
def full_copy(folder: Path, name: str) -> None:
    by_tensors(folder, f"base_model.model.{name}")


def copied(folder: Path, name: str, value: torch.Tensor) -> Any:
    model = hp.save_adapter(folder)
    hp.edit_tensors(folder, lambda tensors: tensors | {f"base_model.model.{name}": value})
    return model


@case(
    "C08",
    "Copies of base weights (`base_layer`) that differ from the base model, or cannot be compared",
    each={
        "head": ("lm_head.base_layer.weight", torch.ones(64, 64)),
        "linear": ("model.layers.0.self_attn.q_proj.base_layer.weight", torch.ones(64, 64)),
    },
    refused="base_layer.weight: differs from the base model",
)
def other_copies(folder: Path, copy: tuple[str, torch.Tensor]) -> Any:
    return copied(folder, *copy)


@case(
    "C08",
    "Copies of base weights (`base_layer`) that differ from the base model, or cannot be compared",
    variant="shape",
    refused="base_layer.weight: wanted a copy of the base model's [64, 64], got [65, 64]",
)
def copy_of_another_size(folder: Path) -> Any:
    return copied(folder, "lm_head.base_layer.weight", torch.ones(65, 64))


@case(
    "C08",
    "Copies of base weights (`base_layer`) that differ from the base model, or cannot be compared",
    variant="bias",
    refused="base_layer.bias: the base model has no bias there",
)
def copy_of_no_bias(folder: Path) -> Any:
    return copied(folder, "model.layers.0.self_attn.q_proj.base_layer.bias", torch.ones(64))


@case(
    "C08",
    "Copies of base weights (`base_layer`) that differ from the base model, or cannot be compared",
    variant="alone",
    refused="base_layer.weight: needs the weights of the base model to be checked",
)
def copy_without_base(folder: Path) -> None:
    copied(folder, "lm_head.base_layer.weight", torch.ones(64, 64))


HEAD = "LoRA on or a copy of lm_head is not supported"


def lm_head(folder: Path) -> None:
    by_tensors(folder, *(f"base_model.model.lm_head.lora_{side}.weight" for side in "AB"))
    hp.edit_config(folder, target_modules=["q_proj", "v_proj", "lm_head"])


def odd_vocabulary() -> ModelSpec:
    sizes = hp.tiny_config().to_dict() | {"vocab_size": 60256}
    return ModelSpec.llama_like(sizes, torch.float32)


case("C10", "LoRA on `lm_head`, tied or not", refused=HEAD)(lm_head)
case("C13", "LoRA on `lm_head`, any size of vocabulary", refused=HEAD, spec=odd_vocabulary)(lm_head)


@case("C11", "New tokens", refused="'<new>': wanted an id below 64, got 64", variant="new")
def new_tokens(folder: Path) -> None:
    hp.save_adapter(folder)
    (folder / "added_tokens.json").write_text(json.dumps({"<old>": 3, "<new>": 64}))


def moved(folder: Path, change: Callable[[str], str], **lora: Any) -> None:
    hp.save_adapter(folder, **lora)
    hp.edit_tensors(folder, lambda tensors: {change(n): t for n, t in tensors.items()})


@case(
    "C19",
    "Layers of another part of the model, or of none",
    each={
        "tower": "model.vision_tower.encoder.layers",
        "draft": "draft_model.layers",
        "nested": "model.layers.0.layers",
        "blocks": "model.blocks",
    },
    refused="lora_A.weight: wanted model.layers.<layer>",
)
def other_path(folder: Path, path: str) -> None:
    moved(
        folder, lambda name: name.replace("model.layers", path, 1).replace("model.model", "model")
    )


@case(
    "C19",
    "Two paths to the layers in one file",
    variant="two",
    refused="has another path to its layers than",
)
def two_paths(folder: Path) -> None:
    moved(folder, lambda name: name.replace("layers.1", "language_model.layers.1"))


@case(
    "C19",
    "A pattern that holds under one spelling of the path only",
    variant="pattern",
    refused="rename the tensors",
)
def pattern_of_one_path(folder: Path) -> None:
    moved(
        folder,
        lambda name: name.replace("model.layers", "model.language_model.layers"),
        alpha_pattern={"^model.layers.1.self_attn.q_proj": 3},
    )


def qkv_only() -> ModelSpec:
    spec = hp.tiny_spec()
    kept = tuple(linear for linear in spec.linears if linear.group == "qkv_proj")
    return ModelSpec(spec.layers, kept, spec.dtype, vocab_size=spec.vocab_size)


@case(
    "C23",
    "Modules outside the server's own list of targets",
    spec=qkv_only,
    refused="down_proj.lora_A.weight: wanted model.layers.<layer>.<module>",
)
def not_served(folder: Path) -> None:
    hp.save_adapter(folder, target_modules=["down_proj"])


def wider() -> ModelSpec:
    sizes = hp.tiny_config().to_dict() | {"hidden_size": 128, "head_dim": 32}
    return ModelSpec.llama_like(sizes, torch.float32)


@case(
    "C38",
    "An adapter of another base model",
    spec=wider,
    refused="wanted shape [8, 128] for this base model, got [8, 64]",
)
def other_base(folder: Path) -> None:
    hp.save_adapter(folder)


@case("C40", "A rank above `--max-lora-rank`", refused="wanted a rank of at most", variant="limit")
def above_limit(folder: Path) -> None:
    hp.save_adapter(folder, rank_pattern={"v_proj": 65})


def all_b(change: Callable[[torch.Tensor], torch.Tensor], folder: Path) -> None:
    hp.save_adapter(folder)
    hp.edit_tensors(
        folder,
        lambda tensors: {n: change(t) if "lora_B" in n else t for n, t in tensors.items()},
    )


@case(
    "C34", "Empty tensors (saved from a partitioned model)", refused="weight: is empty, shape [0]"
)
def empty(folder: Path) -> None:
    all_b(lambda tensor: tensor.new_zeros(0), folder)


@case(
    "C35",
    "NaN or infinite numbers",
    each={"nan": float("nan"), "inf": float("inf")},
    refused="v_proj.lora_B.weight: holds NaN or infinite numbers",
)
def not_finite(folder: Path, number: float) -> None:
    def spoil(tensors: hp.Tensors) -> None:
        tensors[hp.key(1, "self_attn.v_proj", "B")][3, 2] = number

    hp.save_adapter(folder)
    hp.edit_tensors(folder, spoil)


@case(
    "C35",
    "NaN or infinite numbers",
    each={"magnitude": "use_dora", "bias": "lora_bias"},
    refused="holds NaN or infinite numbers",
)
def vector_not_finite(folder: Path, flag: str) -> None:
    name = "lora_magnitude_vector" if flag == "use_dora" else "lora_B.bias"

    def spoil(tensors: hp.Tensors) -> None:
        tensors[f"{LAYER}.self_attn.q_proj.{name}"][3] = float("nan")

    hp.save_adapter(folder, attention_bias=True, **{flag: True})
    hp.edit_tensors(folder, spoil)


@case(
    "C26",
    "Tensors of a Conv1D model (GPT-2)",
    variant="tensors",
    refused="transformer.h.0.attn.c_attn.lora_A.weight: wanted model.layers.<layer>",
)
def gpt2(folder: Path) -> None:
    by_tensors(
        folder, *(f"base_model.model.transformer.h.0.attn.c_attn.lora_{s}.weight" for s in "AB")
    )


@case("C46", "Tensors that fit no module", refused="unknown.lora_A.weight: wanted model.layers.")
def unknown_tensor(folder: Path) -> None:
    by_tensors(folder, f"{LAYER}.mlp.unknown.lora_A.weight")
