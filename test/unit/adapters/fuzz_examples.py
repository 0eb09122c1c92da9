"""Adapter folders at random: right ones as PEFT writes them, and damage done to them."""

import io
import itertools
import json
import zipfile
from pathlib import Path
from typing import Any

import helpers_peft as hp
import peft
import torch
from fuzz_model import BASE, MODULES, PATHS, SIZE_OF
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file

PREFIX = "base_model.model."
BIN = "adapter_model.bin"

KEYS = st.sampled_from(
    (
        *("q_proj", "self_attn.v_proj", "layers.1.mlp.up_proj", "^q_proj", "^model.layers.0.*"),
        *("model.layers.0.self_attn.k_proj", r".*_proj", r"(q|k)_proj", r"layers\.[01]\.mlp\..*"),
        *("(q)_proj|up_proj", r"\d+\.mlp\.down_proj", "o_proj$", "(?i:Q_PROJ)", "q_pro", ".", ""),
    )
)
RANKS = st.integers(1, 5)
ALPHAS = st.integers(-3, 40) | st.floats(-1e6, 1e6, allow_nan=False)
TARGETS = st.sampled_from(["all-linear", r".*self_attn\.[qv]_proj$", "q_proj", None]) | st.lists(
    st.sampled_from([*MODULES, "q_proj", "layers.1.mlp.up_proj", ".*", "lm_head"])
)
CONFIG = st.fixed_dictionaries(
    {"peft_type": st.just("LORA"), "r": RANKS, "lora_alpha": ALPHAS},
    optional={
        "use_rslora": st.booleans(),
        "use_dora": st.booleans(),
        "lora_bias": st.booleans(),
        "rank_pattern": st.dictionaries(KEYS, RANKS, max_size=3),
        "alpha_pattern": st.dictionaries(KEYS, ALPHAS, max_size=3),
        "target_modules": TARGETS,
        "exclude_modules": TARGETS.filter(lambda names: names != "all-linear"),
        "layers_to_transform": st.none() | st.integers(0, 3) | st.lists(st.integers(0, 3)),
        "lora_dropout": st.sampled_from([0, 0.5, 1.0]),
        "init_lora_weights": st.sampled_from([True, False, "gaussian", "orthogonal"]),
        "base_model_name_or_path": st.sampled_from([None, "", "/gone", "a/b"]),
    },
).map(lambda config: _consistent(config))
# How a wrapper of the same model spells `model.`, the first word of every path.
WRAPPERS = ("model.", "model.", "", "model.language_model.", "language_model.model.")
# One draw for all: draws are what takes the time.
SPELLINGS = st.sampled_from(
    list(
        itertools.product(
            (torch.float16, torch.bfloat16, torch.float32),
            (PREFIX, ""),
            ("", ".a", ".lora"),
            WRAPPERS,
            (False, True),
        )
    )
)
# Text that looks like a pattern, a name or nothing at all.
TEXT = KEYS | st.text("qkv_proj.*+?()[]|\\^${}1,", max_size=12) | st.text(max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
KNOWN_KEYS = sorted(peft.LoraConfig(task_type="CAUSAL_LM").to_dict())


def _consistent(config: dict[str, Any]) -> dict[str, Any]:
    """Without what PEFT's own LoraConfig does not accept together."""
    if config.get("use_dora"):
        config.pop("lora_bias", None)
    if config.get("lora_bias"):
        config["init_lora_weights"] = True
    return config


def resolved(config: dict[str, Any], path: str) -> tuple[Any, Any]:
    """Rank and alpha of one module, by PEFT's own matching of the patterns."""
    values = []
    for key, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        table = config.get(pattern) or {}
        values.append(table.get(get_pattern_key(table.keys(), path), config[key]))
    return values[0], values[1]


@st.composite
def right_folders(draw: st.DrawFn, folder: Path) -> list[str]:
    """Write a right adapter to `folder`; the paths of its modules."""
    config = draw(CONFIG)
    paths = draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=6, unique=True))
    # Not torch.manual_seed: for CUDA that keeps a stack trace of each call.
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype, prefix, segment, wrapper, as_bin = draw(SPELLINGS)
    spelt = {path: wrapper + path.removeprefix("model.") for path in paths}
    if any(resolved(config, path) != resolved(config, other) for path, other in spelt.items()):
        spelt = {path: path for path in paths}
    tensors = {}
    for path, name in spelt.items():
        for part, shape in parts_of(config, path, segment).items():
            numbers = torch.randn(shape, generator=source)
            tensors[f"{prefix}{name}.{part}"] = numbers.to(dtype)
    (folder / hp.CONFIG).write_text(json.dumps(config))
    write_tensors(folder, tensors, as_bin=as_bin)
    return paths


def parts_of(config: dict[str, Any], path: str, segment: str) -> dict[str, tuple[int, ...]]:
    """The end of each tensor name of one module, and its shape."""
    rank, _ = resolved(config, path)
    out_features, in_features = SIZE_OF[path]
    parts: dict[str, tuple[int, ...]] = {
        f"lora_A{segment}.weight": (rank, in_features),
        f"lora_B{segment}.weight": (out_features, rank),
    }
    if config.get("use_dora"):
        parts["lora_magnitude_vector" + (segment and segment + ".weight")] = (out_features,)
    if config.get("lora_bias"):
        parts[f"lora_B{segment}.bias"] = (out_features,)
    return parts


def write_tensors(folder: Path, tensors: hp.Tensors, *, as_bin: bool) -> None:
    if as_bin:
        torch.save(tensors, folder / BIN)
    else:
        save_file(tensors, folder / hp.WEIGHTS)


def read_tensors(folder: Path) -> hp.Tensors:
    if (folder / hp.WEIGHTS).exists():
        return hp.load_file(folder / hp.WEIGHTS)
    return dict(torch.load(folder / BIN, weights_only=True))


@st.composite
def broken(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with a few bytes changed, added or gone, and perhaps without its end."""
    bytes_ = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(bytes_))), draw(st.integers(0, 9))
        bytes_[at : at + length] = draw(st.binary(max_size=9))
    return bytes(bytes_[: draw(st.none() | st.integers(0, len(bytes_)))])


@st.composite
def broken_programs(draw: st.DrawFn, content: bytes) -> bytes:
    """A `.bin` archive whose pickle is broken but whose checksums are right."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            data = old.read(entry)
            is_pickle = entry.filename.endswith(".pkl")
            new.writestr(entry.filename, draw(broken(data)) if is_pickle else data)
    return target.getvalue()


@st.composite
def damage(draw: st.DrawFn, folder: Path) -> None:
    """Change a thing or two in the folder, as a trainer, a converter or an enemy might."""
    for change in draw(st.lists(st.sampled_from(_CHANGES), max_size=2)):
        change(draw, folder)
    if draw(st.integers(0, 4)) == 0:  # last, since nothing else can read the config after it
        _config_text(draw, folder)


def _config_value(draw: st.DrawFn, folder: Path) -> None:
    keys = json.loads((folder / hp.CONFIG).read_text())
    key = draw(st.sampled_from(KNOWN_KEYS) | st.text(max_size=5))
    if draw(st.booleans()):
        keys.pop(key, None)
    else:
        keys[key] = draw(JSON)
    (folder / hp.CONFIG).write_text(json.dumps(keys))


def _pattern(draw: st.DrawFn, folder: Path) -> None:
    name = draw(st.sampled_from(["rank_pattern", "alpha_pattern", "target_modules"]))
    value = draw(TEXT) if name == "target_modules" else {draw(TEXT): draw(RANKS)}
    hp.edit_config(folder, **{name: value})


def _config_text(draw: st.DrawFn, folder: Path) -> None:
    text = (folder / hp.CONFIG).read_bytes()
    at = draw(st.integers(0, len(text)))
    (folder / hp.CONFIG).write_bytes(text[:at] + draw(st.binary(max_size=3)) + text[at + 1 :])


def _name(draw: st.DrawFn, folder: Path) -> None:
    tensors = read_tensors(folder)
    name = draw(st.sampled_from(sorted(tensors)))
    parts = name.split(".")
    at = draw(st.integers(0, len(parts) - 1))
    word = draw(WORDS)
    parts[at : at + 1] = draw(st.sampled_from([[word], [parts[at], word], []]))
    tensor = tensors[name] if draw(st.booleans()) else tensors.pop(name)
    tensors[".".join(parts)] = tensor.clone()
    _rewrite(folder, tensors)


def _tensor(draw: st.DrawFn, folder: Path) -> None:
    tensors = read_tensors(folder)
    whole = sorted(n for n, t in tensors.items() if t.dim() > 0 and t.is_floating_point())
    if len(whole) < 2:
        return
    name = draw(st.sampled_from(whole))
    old = tensors.pop(name)
    shape = draw(st.sampled_from([..., None, 0, slice(-1), (..., slice(-1))]))
    if shape is not None:
        new = (old.t() if shape == 0 else old[shape]).contiguous().clone()
        tensors[name] = new.to(draw(st.sampled_from([old.dtype, torch.float64, torch.int8])))
    elif draw(st.booleans()):
        tensors[name] = old.clone().fill_(draw(st.sampled_from(NUMBERS)))
    _rewrite(folder, tensors)


def _base_copy(draw: st.DrawFn, folder: Path) -> None:
    """A base weight or bias beside the adapter, as it is or a little off."""
    path = draw(st.sampled_from(PATHS))
    copies = [tensor for tensor in BASE[path] if tensor is not None]
    tensor = draw(st.sampled_from(copies)).clone()
    if draw(st.booleans()):
        tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] += 1
    kind = draw(st.sampled_from(["weight", "bias"])) if tensor.dim() == 1 else "weight"
    name = f"{draw(st.sampled_from([PREFIX, '']))}{path}.base_layer.{kind}"
    _rewrite(folder, read_tensors(folder) | {name: tensor})


def _flag(draw: st.DrawFn, folder: Path) -> None:
    """Switch DoRA or biases, which the tensors then contradict."""
    key = draw(st.sampled_from(["use_dora", "lora_bias"]))
    keys = json.loads((folder / hp.CONFIG).read_text())
    hp.edit_config(folder, **{key: not keys.get(key)})


def _wrapper(draw: st.DrawFn, folder: Path) -> None:
    """All names under another path to the layers, and a pattern that may tell it from the old."""
    if draw(st.booleans()):
        key = draw(st.sampled_from(["^model.layers.*", "model.layers.[01].*", ".*language_.*"]))
        hp.edit_config(folder, alpha_pattern={key: draw(ALPHAS)})
    wrapper = draw(st.sampled_from([*WRAPPERS, "vision_tower.", "layers.0."]))
    tensors = read_tensors(folder)
    moved = {
        f"{PREFIX}{wrapper}layers.{name.rpartition('layers.')[2]}": tensor
        for name, tensor in tensors.items()
    }
    _rewrite(folder, moved)


def _rewrite(folder: Path, tensors: hp.Tensors) -> None:
    as_bin = not (folder / hp.WEIGHTS).exists()
    for name in (hp.WEIGHTS, BIN):
        (folder / name).unlink(missing_ok=True)
    write_tensors(folder, tensors, as_bin=as_bin)


NUMBERS = [float("nan"), float("inf"), 0.0, 65504.0]
WORDS = st.text(max_size=3) | st.sampled_from(
    (
        *("base_model", "model", "layers", "0", "1", "2", "01", "self_attn", "mlp", "experts"),
        *("q_proj", "v_proj", "up_proj", "qkv_proj", "lm_head", "lora_A", "lora_B", "default"),
        *("weight", "bias", "lora_magnitude_vector", "base_layer", "language_model", ""),
    )
)
_CHANGES = [
    _config_value,
    _name,
    _name,
    _tensor,
    _pattern,
    _base_copy,
    _flag,
    _wrapper,
]
