import helpers_peft as hp
import pytest
import torch

from sglang_graft.adapters import LinearSpec, ModelSpec


def test_llama_like_sizes() -> None:
    spec = hp.tiny_spec(torch.bfloat16)
    sizes = {item.name: (item.in_features, item.out_features) for item in spec.linears}
    assert sizes == {
        "q_proj": (64, 64),
        "k_proj": (64, 32),
        "v_proj": (64, 32),
        "o_proj": (64, 64),
        "gate_proj": (64, 96),
        "up_proj": (64, 96),
        "down_proj": (96, 64),
    }
    assert (spec.layers, spec.vocab_size, spec.layer_prefix) == (2, 64, "model.layers")
    assert list(spec.groups()) == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def test_head_size_of_its_own_and_no_gqa() -> None:
    config = hp.tiny_config().to_dict() | {"head_dim": 24, "num_key_value_heads": None}
    linears = {item.name: item for item in ModelSpec.llama_like(config, torch.float16).linears}
    assert linears["q_proj"].out_features == linears["v_proj"].out_features == 96
    assert linears["o_proj"].in_features == 96


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size: wanted an integer of at least 1, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: wanted an integer of at least 1, got 0"),
        ({"num_key_value_heads": [1, 2]}, r"num_key_value_heads: .* got \[1, 2\]"),
        ({"num_local_experts": 8}, "num_local_experts=8: not a dense"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512: not a dense"),
    ],
)
def test_llama_like_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec.llama_like(hp.tiny_config().to_dict() | changes, torch.float16)


def test_a_spec_has_to_make_sense() -> None:
    linear = LinearSpec("a", "mlp", "g", 8, 8)
    with pytest.raises(ValueError, match="wanted distinct names"):
        ModelSpec(1, (linear, linear), torch.float16)
    with pytest.raises(ValueError, match="must share parent and in_features"):
        ModelSpec(1, (linear, LinearSpec("b", "mlp", "g", 16, 8)), torch.float16)
    with pytest.raises(ValueError, match="wanted a float type"):
        ModelSpec(1, (linear,), torch.int8)
    with pytest.raises(ValueError, match="wanted at least 1, got 0"):
        ModelSpec(0, (linear,), torch.float16)
    with pytest.raises(ValueError, match=r"wanted sizes of at least 1, got \[8, 0\]"):
        LinearSpec("a", "mlp", "g", 0, 8)
