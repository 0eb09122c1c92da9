"""Reading `adapter_config.json`: the numbers that we apply; what we cannot apply is refused."""

from dataclasses import dataclass, field
from pathlib import Path

from sglang_graft.adapters.errors import AdapterError, show
from sglang_graft.adapters.files import read_json_object
from sglang_graft.adapters.refusals import refuse_unsupported

CONFIG_NAME = "adapter_config.json"

_DEFAULT_RANK = 8  # PEFT's, for files that leave `r` or `lora_alpha` out
_DEFAULT_ALPHA = 8
_LARGEST_FILE = 2**20  # bytes; thousands of pattern keys
_LARGEST_ALPHA = 3e38  # a scale has to fit float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The part of a PEFT LoRA config that decides ranks, scales and targets.

    Patterns keep the order of the file, since the first one that matches wins. Targets are only
    compared with the tensors of the weights file, for warnings.
    """

    file: Path
    rank: int
    alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    target_modules: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None
    layers_to_transform: tuple[int, ...] | None = None


def read_config(folder: Path) -> LoraConfig:
    """Read and check `adapter_config.json`. Raises AdapterError naming the key."""
    file = folder / CONFIG_NAME
    keys = read_json_object(file, _LARGEST_FILE)
    refuse_unsupported(file, keys)
    return LoraConfig(
        file=file,
        rank=_rank(file, "r", keys.get("r", _DEFAULT_RANK)),
        alpha=_number(file, "lora_alpha", keys.get("lora_alpha", _DEFAULT_ALPHA)),
        use_rslora=_flag(file, "use_rslora", keys.get("use_rslora")),
        use_dora=_flag(file, "use_dora", keys.get("use_dora")),
        lora_bias=_flag(file, "lora_bias", keys.get("lora_bias")),
        rank_pattern={
            key: _rank(file, f"rank_pattern[{show(key)}]", value)
            for key, value in _mapping(file, "rank_pattern", keys.get("rank_pattern")).items()
        },
        alpha_pattern={
            key: _number(file, f"alpha_pattern[{show(key)}]", value)
            for key, value in _mapping(file, "alpha_pattern", keys.get("alpha_pattern")).items()
        },
        target_modules=_names(file, "target_modules", keys.get("target_modules")),
        exclude_modules=_names(file, "exclude_modules", keys.get("exclude_modules")),
        layers_to_transform=_layers(file, keys.get("layers_to_transform")),
    )


def _rank(file: Path, key: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(file, key, f"wanted an integer of at least 1, got {show(value)}")
    return value


def _number(file: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterError(file, key, f"wanted a number, got {show(value)}")
    if not -_LARGEST_ALPHA <= value <= _LARGEST_ALPHA:  # NaN fails this too
        raise AdapterError(file, key, f"wanted a finite float32, got {show(value)}")
    return float(value)


def _flag(file: Path, key: str, value: object) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise AdapterError(file, key, f"wanted true or false, got {show(value)}")
    return value


def _mapping(file: Path, key: str, value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise AdapterError(file, key, f"wanted an object of pattern: number, got {show(value)}")
    return value


def _names(file: Path, key: str, value: object) -> str | tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise AdapterError(file, key, f"wanted a string or a list of strings, got {show(value)}")


def _layers(file: Path, value: object) -> tuple[int, ...] | None:
    if value is None or value == []:  # PEFT reads an empty list as "all layers" too
        return None
    layers = value if isinstance(value, list) else [value]
    if any(type(layer) is not int for layer in layers):
        raise AdapterError(
            file,
            "layers_to_transform",
            f"wanted an integer or a list of integers, got {show(value)}",
        )
    return tuple(layers)
