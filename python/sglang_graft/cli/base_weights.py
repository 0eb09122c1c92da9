"""The weights of a base model's folder, one linear at a time, for adapters that depend on them."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sglang_graft.adapters import AdapterError, BaseWeight, ModelSpec, NoBaseWeight
from sglang_graft.adapters.files import read_json_object

_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OUTSIDE = {
    # A tied head has no tensor of its own.
    "lm_head": ("lm_head.weight", "model.embed_tokens.weight"),
    "embed_tokens": ("model.embed_tokens.weight",),
}


def folder_weights(folder: Path, spec: ModelSpec) -> BaseWeight | None:
    """A reader of the safetensors in `folder`, cast to `spec.dtype` as a server casts them.

    None when there are none under the names of a Llama-shaped model. Raises ValueError for files
    that cannot be read.
    """
    try:
        files = _files(folder)
    except (AdapterError, SafetensorError, OSError) as error:
        raise ValueError(f"--model: {folder}: {error}") from None
    parents = {linear.name: linear.parent for linear in spec.linears}
    first = spec.linears[0]
    if f"{spec.layer_prefix}.0.{first.parent}.{first.name}.weight" not in files:
        return None

    def read(layer: int | None, linear: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        if layer is None:
            names = [name for name in _OUTSIDE.get(linear, ()) if name in files]
            if not names:
                raise NoBaseWeight(f"{folder} has no {linear}")
            return _tensor(files[names[0]], names[0], spec.dtype), None
        path = f"{spec.layer_prefix}.{layer}.{parents[linear]}.{linear}"
        weight, bias = f"{path}.weight", f"{path}.bias"
        if weight not in files:
            raise NoBaseWeight(f"{folder} has no {weight}")
        added = _tensor(files[bias], bias, spec.dtype) if bias in files else None
        return _tensor(files[weight], weight, spec.dtype), added

    return read


def _files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    if (folder / _INDEX).is_file():
        names = read_json_object(folder / _INDEX).get("weight_map")
        if not isinstance(names, dict):
            raise AdapterError(folder / _INDEX, "weight_map", "wanted tensor names and files")
        return {name: folder / Path(str(file)).name for name, file in names.items()}
    if not (folder / _ONE_FILE).is_file():
        return {}
    with safe_open(folder / _ONE_FILE, framework="pt", device="cpu") as handle:
        return dict.fromkeys(handle.keys(), folder / _ONE_FILE)


def _tensor(file: Path, name: str, dtype: torch.dtype) -> torch.Tensor:
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            stored: torch.Tensor = handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise NoBaseWeight(f"{name} cannot be read from {file}: {error}") from error
    if stored.dtype not in _PLAIN:
        raise NoBaseWeight(f"{name} is held as {stored.dtype}; take the unquantized base model")
    return stored.to(dtype)
