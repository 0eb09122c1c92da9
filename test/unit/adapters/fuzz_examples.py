"""Adapter folders at random: right ones as PEFT writes them, and damage done to them."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import helpers_peft as hp
import peft
import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

from sglang_graft.adapters import ModelSpec

LAYERS = 2
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
SPEC = ModelSpec.llama_like(SIZES, torch.float32)
MODULES = [f"{linear.parent}.{linear.name}" for linear in SPEC.linears]
PATHS = [f"model.layers.{layer}.{module}" for layer in range(LAYERS) for module in MODULES]
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
        "rank_pattern": st.dictionaries(KEYS, RANKS, max_size=3),
        "alpha_pattern": st.dictionaries(KEYS, ALPHAS, max_size=3),
        "target_modules": TARGETS,
        "exclude_modules": TARGETS.filter(lambda names: names != "all-linear"),
        "layers_to_transform": st.none() | st.integers(0, 3) | st.lists(st.integers(0, 3)),
        "lora_dropout": st.floats(0, 1),
        "init_lora_weights": st.sampled_from([True, False, "gaussian", "orthogonal"]),
        "base_model_name_or_path": st.none() | st.text(max_size=4),
    },
)
# Text that looks like a pattern, a name or nothing at all.
TEXT = KEYS | st.text("qkv_proj.*+?()[]|\\^${}1,", max_size=12) | st.text(max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
KNOWN_KEYS = sorted(peft.LoraConfig(task_type="CAUSAL_LM").to_dict())


def skeleton() -> torch.nn.Module:
    """The linears of SPEC under their names, and nothing else of a model."""
    root = torch.nn.Module()
    root.model = torch.nn.Module()
    root.model.layers = torch.nn.ModuleList()
    for _ in range(LAYERS):
        layer = torch.nn.Module()
        for linear in SPEC.linears:
            if not hasattr(layer, linear.parent):
                setattr(layer, linear.parent, torch.nn.Module())
            module = torch.nn.Linear(linear.in_features, linear.out_features, bias=False)
            setattr(getattr(layer, linear.parent), linear.name, module)
        root.model.layers.append(layer)
    return root


def peft_model(config: dict[str, Any], paths: list[str]) -> peft.PeftModel:
    """PEFT with LoRA on exactly `paths`; ranks and scales as it resolves them from `config`."""
    numbers = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
    chosen = {key: config[key] for key in numbers if config.get(key) is not None}
    targets = "|".join(path.replace(".", r"\.") for path in paths)
    return peft.PeftModel(skeleton(), peft.LoraConfig(target_modules=targets, **chosen))


@st.composite
def right_folders(draw: st.DrawFn, folder: Path) -> list[str]:
    """Write a right adapter to `folder`; the paths of its modules."""
    config = draw(CONFIG)
    paths = draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=6, unique=True))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    prefix, segment = (
        draw(st.sampled_from([PREFIX, ""])),
        draw(st.sampled_from(["", ".a", ".lora"])),
    )
    tensors = {}
    for name, tensor in peft.get_peft_model_state_dict(peft_model(config, paths)).items():
        spelt = prefix + name.removeprefix(PREFIX).removesuffix(".weight") + segment + ".weight"
        tensors[spelt] = torch.randn(tensor.shape).to(dtype)
    (folder / hp.CONFIG).write_text(json.dumps(config))
    write_tensors(folder, tensors, as_bin=draw(st.booleans()))
    return paths


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
    whole = sorted(n for n, t in tensors.items() if t.dim() == 2 and t.is_floating_point())
    if len(whole) < 2:
        return
    name = draw(st.sampled_from(whole))
    old = tensors.pop(name)
    shape = draw(st.sampled_from([..., None, 0, slice(-1), (slice(None), slice(-1))]))
    if shape is not None:
        new = (old.t() if shape == 0 else old[shape]).contiguous().clone()
        tensors[name] = new.to(draw(st.sampled_from([old.dtype, torch.float64, torch.int8])))
    elif draw(st.booleans()):
        tensors[name] = old.clone().fill_(draw(st.sampled_from(NUMBERS)))
    _rewrite(folder, tensors)


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
        *("weight", "bias", "lora_magnitude_vector", "base_layer", ""),
    )
)
_CHANGES = [_config_value, _name, _tensor, _pattern]
