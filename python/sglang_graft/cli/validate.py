"""`graft validate`: what of an adapter would be applied where, without a server."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_graft.adapters import Adapter, AdapterError, ModelSpec, TileMap, measure, read_adapter
from sglang_graft.adapters.chat_template import read_chat_template
from sglang_graft.adapters.config import CONFIG_NAME
from sglang_graft.adapters.files import read_json_object
from sglang_graft.cli.base_weights import folder_weights
from sglang_graft.pool import PageLayout, default_page_tokens

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


class Base(BaseModel):
    """The base model that an adapter was checked against, and the pages that it would lie in."""

    path: str
    dtype: str
    page_tokens: int
    page_bytes: int


class Linear(BaseModel):
    """One kind of linear over all layers: in how many it is touched, at which ranks and scales."""

    name: str
    modules: int
    layers: int
    ranks: list[int]
    scales: list[float]


class Refusal(BaseModel):
    """Why nothing of an adapter is applied."""

    file: str
    item: str
    reason: str


class Verdict(BaseModel):
    """One adapter: what is applied, or `refused`."""

    path: str
    refused: Refusal | None = None
    base: Base | None = None
    identity: str = ""
    modules: int = 0
    linears: list[Linear] = []
    nbytes: int = 0
    pages: int = 0
    warnings: list[str] = []


class Options(BaseModel):
    """What of the server's options decides about adapters; None takes the server's default."""

    model: Path | None = None
    page_tokens: int | None = None
    max_rank: int = 256
    dtype: str | None = None


def validate(path: Path, options: Options) -> Verdict:
    """Read the adapter in folder `path` as a server would.

    Raises ValueError for a base model or a page size that no adapter could be checked against.
    """
    try:
        folder = options.model or _named_model(path)
        base, tiles = _base(folder, options)
        adapter = read_adapter(path, tiles.spec, folder_weights(folder, tiles.spec))
        nbytes, pages = measure(adapter, tiles)
        if read_chat_template(path) is not None:
            # Compiled as the server does it; SGLang takes seconds to import.
            from sglang_graft.serving import chat_templates

            chat_templates.read(path)
    except AdapterError as error:
        refused = Refusal(file=str(error.file), item=error.item, reason=error.reason)
        return Verdict(path=str(path), refused=refused)
    return Verdict(
        path=str(path),
        base=base,
        identity=adapter.identity,
        modules=len(adapter.deltas),
        linears=_linears(adapter, tiles.spec),
        nbytes=nbytes,
        pages=pages,
        warnings=list(adapter.warnings),
    )


def _named_model(path: Path) -> Path:
    """The base model that the adapter names, if that is a folder here. Nothing is ever fetched."""
    file = path / CONFIG_NAME
    name = read_json_object(file).get("base_model_name_or_path")
    if not isinstance(name, str) or not os.path.isdir(name):
        raise AdapterError(
            file,
            "base_model_name_or_path",
            f"wanted a local folder, got {name!r}; pass the base model with --model",
        )
    return Path(name)


def _base(folder: Path, options: Options) -> tuple[Base, TileMap]:
    try:
        config = read_json_object(folder / "config.json")
    except AdapterError as error:
        raise ValueError(f"--model: {error}") from None
    name = options.dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if name not in _DTYPES:
        raise ValueError(f"--dtype: wanted one of {', '.join(_DTYPES)}, got {name!r}")
    try:
        spec = ModelSpec.llama_like(config, _DTYPES[name])
    except ValueError as error:
        raise ValueError(f"--model: {folder}: {error}") from None
    layout = _layout(spec, config, options.page_tokens)
    base = Base(
        path=str(folder),
        dtype=name,
        page_tokens=layout.page_tokens,
        page_bytes=layout.page_bytes,
    )
    return base, TileMap(spec, layout.page_bytes, max_rank=options.max_rank)


def _layout(spec: ModelSpec, config: Mapping[str, Any], page_tokens: int | None) -> PageLayout:
    """Pages as the server makes them, with KV of the weights' own dtype."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = next(linear.out_features for linear in spec.linears if linear.name == "k_proj")
    row_bytes = width * spec.dtype.itemsize
    return PageLayout(
        layers=spec.layers,
        page_tokens=page_tokens or default_page_tokens(layers=spec.layers, row_bytes=row_bytes),
        kv_heads=heads,
        head_dim=width // heads,
        dtype=spec.dtype,
    )


def _linears(adapter: Adapter, spec: ModelSpec) -> list[Linear]:
    rows = []
    for linear in spec.linears:
        deltas = [delta for (_, name), delta in adapter.deltas.items() if name == linear.name]
        if deltas:
            rows.append(
                Linear(
                    name=linear.name,
                    modules=len(deltas),
                    layers=spec.layers,
                    ranks=sorted({delta.rank for delta in deltas}),
                    scales=sorted({delta.scale for delta in deltas}),
                )
            )
    return rows


def show(verdicts: list[Verdict], console: Console) -> None:
    """Print all verdicts for a person: a table for each applied adapter, reasons for the others."""
    for verdict in verdicts:
        if verdict.refused is None:
            _show_applied(verdict, console)
        else:
            refused = verdict.refused
            console.print(f"[red]refused[/] {escape(verdict.path)}")
            text = str(AdapterError(Path(refused.file), refused.item, refused.reason))
            console.print(f"  {escape(text)}", highlight=False, soft_wrap=True)
    counts = Counter("applied" if verdict.refused is None else "refused" for verdict in verdicts)
    console.print(", ".join(f"{count} {word}" for word, count in sorted(counts.items())))


def _show_applied(verdict: Verdict, console: Console) -> None:
    assert verdict.base is not None, verdict.path
    base = verdict.base
    table = Table(title=f"[green]applied[/] {escape(verdict.path)}", title_justify="left")
    for column in ("linear", "layers", "ranks", "scales"):
        table.add_column(column, justify="left" if column == "linear" else "right", overflow="fold")
    for row in verdict.linears:
        table.add_row(
            row.name,
            f"{row.modules} of {row.layers}",
            _list(row.ranks),
            _list(row.scales),
        )
    console.print(table)
    console.print(
        f"  {verdict.modules} modules, {verdict.nbytes} bytes of weights in {verdict.pages} pages "
        f"of {base.page_bytes} bytes ({base.page_tokens} tokens, {base.dtype})",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"  identity {verdict.identity}", highlight=False, soft_wrap=True)
    for warning in verdict.warnings:
        console.print(f"  [yellow]warning[/] {escape(warning)}", highlight=False, soft_wrap=True)


def _list(numbers: list[int] | list[float]) -> str:
    shown = [f"{number:.6g}" for number in numbers[:6]]
    return ", ".join(shown + ["..."] * (len(numbers) > 6))
