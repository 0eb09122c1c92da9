"""Tiny random models with a tokenizer of whole words, so that a server starts and answers fast."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

with warnings.catch_warnings():
    # Their imports warn about their own code; in tests a warning is an error.
    warnings.simplefilter("ignore")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedModel,
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

VOCABULARY = 512
CONTEXT = 2048


def config() -> LlamaConfig:
    """3 layers, hidden 96, 6 heads of 16 over 2 KV heads, inner 192. Wide enough to vary."""
    return LlamaConfig(
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def new_model() -> LlamaForCausalLM:
    """The base model, the same at each call."""
    torch.manual_seed(11)
    return LlamaForCausalLM(config()).eval()


def new_biased_model() -> Qwen2ForCausalLM:
    """A Qwen2 of the same size: biases on q, k and v, and a tied head."""
    torch.manual_seed(12)
    sizes = config().to_dict()
    names = [
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size", "max_position_embeddings", "initializer_range"),
    ]
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    shape = {name: sizes[name] for name in names}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, **tokens, tie_word_embeddings=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.bias"):
                parameter.normal_(std=0.5)
    return model.eval()


def save_model(folder: Path, new: Callable[[], PreTrainedModel] = new_model) -> Path:
    """Write weights (float32) and tokenizer; returns `folder`."""
    new().save_pretrained(folder)
    return save_tokenizer(folder)


def save_tokenizer(folder: Path) -> Path:
    """Write the tokenizer alone; returns `folder`.

    Beside the config of a Qwen2, transformers would take it for that model's own kind.
    """
    words = Tokenizer(models.WordLevel({word(i): i for i in range(VOCABULARY)}, unk_token=word(0)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def word(token: int) -> str:
    """The text of one token."""
    return f"w{token}"


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random tokens. Equal seeds of different lengths share their beginning."""
    source = random.Random(seed)
    return tuple(source.randrange(VOCABULARY) for _ in range(length))
