"""The default of `--page-size`: read from the model's config before SGLang resolves it to 1."""

from typing import Any

import torch
from sglang.srt.platforms import current_platform
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_graft.pool import default_page_tokens

_DTYPE_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4}


def _itemsize(server_args: Any, text_config: Any) -> int:
    if server_args.kv_cache_dtype.startswith("fp8"):
        return 1
    # A platform may choose the dtype; SGLang asks it only later, so ask it here as well.
    current_platform.apply_server_args_defaults(server_args)
    if server_args.dtype != "auto":
        return _DTYPE_BYTES[server_args.dtype]
    dtype = getattr(text_config, "dtype", None) or torch.bfloat16
    # SGLang serves float32 checkpoints in float16 or bfloat16 under `--dtype auto`.
    return 2 if dtype == torch.float32 else int(dtype.itemsize)


def default_page_size(server_args: Any) -> int:
    """Tokens in a page: the choice of 16, 32, 64 that makes a page closest to 2 MiB."""
    model = get_config(
        server_args.model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
    )
    text = model.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    row_bytes = heads * head_dim * _itemsize(server_args, text)
    return default_page_tokens(layers=text.num_hidden_layers, row_bytes=row_bytes)
