"""Which linear layers of a base model an adapter may touch, and their sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One linear of every layer: weight `[out_features, in_features]`.

    `name` is its own name ("q_proj"), `parent` the block that holds it ("self_attn"), and `group`
    the stacked projection it is served in ("qkv_proj"; its own name when it stands alone). The
    members of a group are stacked in the order in which the spec lists them.
    """

    name: str
    parent: str
    group: str
    in_features: int
    out_features: int

    def __post_init__(self) -> None:
        if self.in_features < 1 or self.out_features < 1:
            raise ValueError(
                f"LinearSpec {self.name}: wanted sizes of at least 1, got "
                f"[{self.out_features}, {self.in_features}]"
            )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a base model as adapters see it: all layers alike.

    `dtype` is what adapter weights are cast to once. `vocab_size` tells tokens that an adapter adds
    from a copy of the base vocabulary; None means that this is not checked.
    """

    layers: int
    linears: tuple[LinearSpec, ...]
    dtype: torch.dtype
    layer_prefix: str = "model.layers"
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"ModelSpec.layers: wanted at least 1, got {self.layers}")
        if not self.dtype.is_floating_point:
            raise ValueError(f"ModelSpec.dtype: wanted a float type, got {self.dtype}")
        names = [linear.name for linear in self.linears]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"ModelSpec.linears: wanted distinct names, got {names}")
        for members in self.groups().values():
            if len({(member.parent, member.in_features) for member in members}) != 1:
                raise ValueError(
                    f"ModelSpec.linears: members of group {members[0].group} must share parent and "
                    f"in_features, got {members}"
                )

    def groups(self) -> dict[str, tuple[LinearSpec, ...]]:
        """Group name -> its members, both in the order of `linears`."""
        members: dict[str, tuple[LinearSpec, ...]] = {}
        for linear in self.linears:
            members[linear.group] = (*members.get(linear.group, ()), linear)
        return members

    @classmethod
    def llama_like(cls, config: Mapping[str, Any], dtype: torch.dtype) -> "ModelSpec":
        """The spec of a dense Llama-shaped model (q, k, v, o, gate, up, down) from `config.json`.

        Raises ValueError naming the key when one is missing or the model has experts or latent
        attention, whose linears are not these seven.
        """
        for key in ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank"):
            if config.get(key):
                raise ValueError(
                    f"config.json: {key}={config[key]}: not a dense Llama-shaped model"
                )
        hidden, inner = _size(config, "hidden_size"), _size(config, "intermediate_size")
        heads = _size(config, "num_attention_heads")
        kv_heads = _size(config, "num_key_value_heads", heads)
        head_dim = _size(config, "head_dim", hidden // heads)
        query, key_value = heads * head_dim, kv_heads * head_dim
        linears = (
            LinearSpec("q_proj", "self_attn", "qkv_proj", hidden, query),
            LinearSpec("k_proj", "self_attn", "qkv_proj", hidden, key_value),
            LinearSpec("v_proj", "self_attn", "qkv_proj", hidden, key_value),
            LinearSpec("o_proj", "self_attn", "o_proj", query, hidden),
            LinearSpec("gate_proj", "mlp", "gate_up_proj", hidden, inner),
            LinearSpec("up_proj", "mlp", "gate_up_proj", hidden, inner),
            LinearSpec("down_proj", "mlp", "down_proj", inner, hidden),
        )
        vocab = config.get("vocab_size")
        return cls(_size(config, "num_hidden_layers"), linears, dtype, vocab_size=vocab)


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json: {key}: wanted an integer of at least 1, got {value!r}")
    return value
