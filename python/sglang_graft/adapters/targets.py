"""Does the config name the modules that the file holds? Tensor names win; a difference is told."""

import re
from collections.abc import Iterable

from sglang_graft.adapters.config import LoraConfig
from sglang_graft.adapters.errors import AdapterError
from sglang_graft.adapters.names import Module


def disagreements(config: LoraConfig, modules: Iterable[Module]) -> list[str]:
    """A sentence for each way in which `target_modules` and its relatives differ from `modules`."""
    modules = list(modules)
    warnings = [
        f"target_modules: {text!r} matches no tensor of the file"
        for text, target in _entries(config.target_modules)
        if not any(_matches(config, "target_modules", target, module.path) for module in modules)
    ]
    unnamed = [module.path for module in modules if not _is_targeted(config, module)]
    if unnamed:
        warnings.append(
            f"target_modules: {unnamed[0]} (first of {len(unnamed)}) is no target by the config "
            "but has weights in the file; they are applied"
        )
    return warnings


def _entries(names: str | tuple[str, ...] | None) -> list[tuple[str, str | tuple[str, ...]]]:
    """Each target as it is written, and as `_matches` takes it."""
    if names is None or names == "all-linear":
        return []
    return [(names, names)] if isinstance(names, str) else [(name, (name,)) for name in names]


def _is_targeted(config: LoraConfig, module: Module) -> bool:
    if _matches(config, "exclude_modules", config.exclude_modules or (), module.path):
        return False
    layers = config.layers_to_transform
    if layers is not None and module.layer not in layers:
        return False
    targets = config.target_modules
    if targets is None or targets == "all-linear":
        return True
    return _matches(config, "target_modules", targets, module.path)


def _matches(config: LoraConfig, key: str, names: str | tuple[str, ...], path: str) -> bool:
    """A string is one regular expression for the whole path; list entries are path endings."""
    if isinstance(names, tuple):
        return any(path == name or path.endswith("." + name) for name in names)
    try:
        return re.fullmatch(names, path) is not None
    except re.error as error:
        raise AdapterError(
            config.file, key, f"{names!r} is not a regular expression: {error}"
        ) from error
