"""The sizes of a base model that budgets are computed from, read from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_graft.adapters import ModelSpec
from sglang_graft.pool import PageLayout, default_page_tokens
from sglang_graft.sim.sizes import Sizes

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""What both sides serve in: given to them as `--dtype`, so that neither chooses by itself."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A base model served in `spec.dtype`, weights, adapters and KV alike."""

    spec: ModelSpec
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int

    @classmethod
    def read(cls, folder: Path, device: str) -> ModelShape:
        """From `config.json` in `folder`, for a server on `device` (cpu, cuda).

        ValueError when it is missing or is no dense Llama-shaped model.
        """
        if device not in DTYPES:
            raise ValueError(f"--device: wanted one of {', '.join(DTYPES)}, got {device!r}")
        file = folder / "config.json"
        if not file.is_file():
            raise ValueError(f"--model: wanted a folder with a config.json, got {folder}")
        config = json.loads(file.read_text())
        spec = ModelSpec.llama_like(config, DTYPES[device])
        heads = config["num_attention_heads"]
        return cls(
            spec=spec,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
            context=config.get("max_position_embeddings", 1 << 30),
        )

    @property
    def dtype_name(self) -> str:
        """As `--dtype` names it."""
        return str(self.spec.dtype).removeprefix("torch.")

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.spec.layers * self.kv_heads * self.head_dim * self.spec.dtype.itemsize

    @property
    def adapter_bytes_per_rank(self) -> int:
        """A and B of all linears for one rank."""
        features = sum(linear.in_features + linear.out_features for linear in self.spec.linears)
        return features * self.spec.layers * self.spec.dtype.itemsize

    @property
    def page_tokens(self) -> int:
        """Tokens in a page of Graft's pool, as its server chooses by default."""
        row = self.kv_heads * self.head_dim * self.spec.dtype.itemsize
        return default_page_tokens(layers=self.spec.layers, row_bytes=row)

    @property
    def layout(self) -> PageLayout:
        """A page of Graft's pool."""
        return PageLayout(
            layers=self.spec.layers,
            page_tokens=self.page_tokens,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.spec.dtype,
        )

    @property
    def sizes(self) -> Sizes:
        """The same for a replay."""
        return Sizes(
            kv_bytes_per_token=self.kv_bytes_per_token,
            adapter_bytes_per_rank=self.adapter_bytes_per_rank,
            page_tokens=self.page_tokens,
        )
