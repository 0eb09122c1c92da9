"""Random base models of a given shape, for measuring: speed and memory are real, text is noise."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_graft.adapters import ModelSpec
from sglang_graft.sim.workloads import SMALLEST_VOCABULARY

SHAPES: dict[str, dict[str, int]] = {
    "llama-3.1-8b": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
    },
    "tiny": {
        "num_hidden_layers": 3,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": SMALLEST_VOCABULARY,
    },
}
"""By the name that `graft bench model` takes."""
# As many tensors as a real model has: reading adapters takes Python's time for each.
SHAPES["tiny-deep"] = SHAPES["tiny"] | {"num_hidden_layers": 32}

_LAYERS_A_FILE = 8
_CONTEXT = 131_072
# Small shapes need wide weights, or every prompt ends in the same token.
_STD = {"llama-3.1-8b": 0.02, "tiny": 0.3, "tiny-deep": 0.3}

Draw = Callable[..., torch.Tensor]


def make_model(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the model called `name`, in bfloat16, with a tokenizer of whole words.

    Returns `folder`. ValueError names the known shapes.
    """
    if name not in SHAPES:
        raise ValueError(f"SHAPE: wanted one of {', '.join(SHAPES)}, got {name!r}")
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        found = torch.randn(*shape, generator=source, device=device, dtype=torch.bfloat16)
        return (found * _STD[name]).cpu()

    files: dict[str, str] = {}
    for number, tensors in enumerate(_parts(config, draw)):
        file = f"model-{number}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, file))
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _save_tokenizer(folder, config["vocab_size"])
    # Last: its presence says that the folder is whole.
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _config(name: str) -> dict[str, Any]:
    return {
        **SHAPES[name],
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _parts(config: dict[str, Any], draw: Draw) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors by name, a file at a time."""
    spec = ModelSpec.llama_like(config, torch.bfloat16)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield {
        "model.embed_tokens.weight": draw(vocabulary, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": draw(vocabulary, hidden),
    }
    for first in range(0, spec.layers, _LAYERS_A_FILE):
        tensors = {}
        for layer in range(first, min(first + _LAYERS_A_FILE, spec.layers)):
            prefix = f"{spec.layer_prefix}.{layer}"
            for linear in spec.linears:
                name = f"{prefix}.{linear.parent}.{linear.name}.weight"
                tensors[name] = draw(linear.out_features, linear.in_features)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        yield tensors


def _save_tokenizer(folder: Path, vocabulary: int) -> None:
    from tokenizers import (
        Tokenizer,
        models,
        pre_tokenizers,
    )
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    fast.save_pretrained(folder)
