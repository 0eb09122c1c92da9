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


@case("dora", "DoRA (`use_dora`)", refused="use_dora: wanted it off, got True: DoRA also scales")
def dora(folder: Path) -> None:
    hp.save_adapter(folder, use_dora=True)


@case(
    "dora", "DoRA (`use_dora`)", refused="lora_magnitude_vector: DoRA magnitudes", variant="tensors"
)
def dora_tensors(folder: Path) -> None:
    hp.save_adapter(folder, use_dora=True)
    hp.edit_config(folder, use_dora=False)


@case("lora-bias", "`lora_bias`", refused="lora_bias: wanted it off, got True: biases of LoRA")
def lora_bias(folder: Path) -> None:
    by_tensors(folder, f"{LAYER}.self_attn.q_proj.lora_B.bias")
    hp.edit_config(folder, lora_bias=True)


@case("lora-bias", "`lora_bias`", refused="lora_B.bias: bias tensors", variant="tensors")
def lora_bias_tensors(folder: Path) -> None:
    by_tensors(folder, f"{LAYER}.self_attn.q_proj.lora_B.bias")


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


@case("C08", "`base_layer` weights in the file", refused="base_layer.weight: LoRA on or a copy of")
def base_layer(folder: Path) -> None:
    by_tensors(folder, "base_model.model.lm_head.base_layer.weight")


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


@case("C19", "Modules under another path than the model's", refused="wanted model.layers.<layer>")
def other_path(folder: Path) -> None:
    hp.save_adapter(folder)
    hp.edit_tensors(
        folder,
        lambda tensors: {
            name.replace("model.layers", "model.language_model.layers"): tensor
            for name, tensor in tensors.items()
        },
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


@case("C46", "Tensors that fit no module", refused="unknown.lora_A.weight: wanted model.layers.")
def unknown_tensor(folder: Path) -> None:
    by_tensors(folder, f"{LAYER}.mlp.unknown.lora_A.weight")
