"""Config keys that change what an adapter computes and that we do not apply.

Every key is either applied, known to change nothing, or it has to be off. A key of a
later PEFT that we have never seen is therefore accepted only while it is off.
"""

from collections.abc import Mapping
from pathlib import Path

from sglang_graft.adapters.errors import AdapterError, show

# Read elsewhere in this package.
_APPLIED = frozenset(
    {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"}
    | {"exclude_modules", "layers_to_transform", "use_dora", "lora_bias"}
)

# About training, start values, or where the adapter came from: the weights say it all. The base
# model's name is never fetched and never judged; shapes are.
_HARMLESS = frozenset(
    {"auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"}
    | {"peft_version", "lora_dropout", "layers_pattern", "runtime_config", "megatron_core"}
    | {"loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"}
    | {"ensure_weight_tying"}
)

# Key -> what is wrong with it, for a message better than "unknown".
_UNSUPPORTED: dict[str, str] = {
    "modules_to_save": "full copies of base modules are not supported, only LoRA matrices",
    "trainable_token_indices": "changed token embeddings are not supported",
    "fan_in_fan_out": "transposed base weights (Conv1D, as in GPT-2) are not supported",
    "layer_replication": "a rebuilt layer stack is not supported",
    "target_parameters": "LoRA on bare parameters (fused experts) is not supported",
    "use_qalora": "QALoRA pools the inputs",
    "megatron_config": "Megatron's parallel layers are not supported",
    "alora_invocation_tokens": "activated LoRA starts in the middle of a prompt",
    "use_bdlora": "block-diagonal matrices are not supported",
    "arrow_config": "routing between adapters is not supported",
    "kasa_config": "KaSA changes the base weights",
    "monteclora_config": "Monte Carlo sampling of the weights is not supported",
    "velora_config": "VeLoRA is not supported",
}

_KEPT_BASE_INITS = frozenset({"true", "false", "none", "gaussian", "eva", "orthogonal", "mica"})
_CHANGED_BASE_INITS = ("pissa", "corda", "olora", "loftq", "lora_ga")

_SPECIAL = frozenset({"peft_type", "bias", "init_lora_weights"})


def refuse_unsupported(file: Path, keys: Mapping[str, object]) -> None:
    """Raise AdapterError for the first key (by name) that asks for what we do not apply."""
    if keys.get("peft_type") != "LORA":
        raise AdapterError(file, "peft_type", f"wanted 'LORA', got {show(keys.get('peft_type'))}")
    if keys.get("bias", "none") not in ("none", None):
        raise AdapterError(
            file,
            "bias",
            f"wanted 'none', got {show(keys['bias'])}: trained biases are not supported",
        )
    if keys.get("use_dora") and keys.get("lora_bias"):
        raise AdapterError(
            file,
            "lora_bias",
            "wanted it off beside use_dora: PEFT does not define the two together",
        )
    _refuse_changed_base(file, keys.get("init_lora_weights"))
    for key in sorted(keys.keys() - _APPLIED - _HARMLESS - _SPECIAL):
        if not keys[key]:
            continue
        why = _UNSUPPORTED.get(key, "not a key that we know, so it may change the result")
        raise AdapterError(file, key, f"wanted it off, got {show(keys[key])}: {why}")


def _refuse_undefined_bias(file: Path, keys: Mapping[str, object]) -> None:
    """PEFT's LoraConfig does not accept these beside `lora_bias`, so there is nothing to equal."""
    if keys.get("use_dora"):
        raise AdapterError(file, "lora_bias", "wanted it off beside use_dora, as PEFT wants it")
    init = keys.get("init_lora_weights", True)
    if not isinstance(init, bool):
        raise AdapterError(
            file, "lora_bias", f"wanted it off beside init_lora_weights {show(init)}, as PEFT does"
        )


def _refuse_changed_base(file: Path, init: object) -> None:
    """PEFT repeats these initialisations on loading and takes their start value off the base model.

    Weights saved like that are relative to a base that no other request may see.
    """
    plain = init is None or isinstance(init, str | bool)
    name = str(init).lower() if plain else ""
    if name in _KEPT_BASE_INITS:
        return
    if name.startswith(_CHANGED_BASE_INITS):
        raise AdapterError(
            file,
            "init_lora_weights",
            f"got {show(init)}: the weights are relative to a changed base model; convert them to "
            "plain LoRA with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    raise AdapterError(
        file, "init_lora_weights", f"not an initialisation that we know: {show(init)}"
    )
