"""Does the config name the modules that the file holds? Tensor names win; a difference is told."""

from collections.abc import Callable, Iterable, Iterator

from sglang_graft.adapters.config import LoraConfig
from sglang_graft.adapters.errors import show
from sglang_graft.adapters.names import Module
from sglang_graft.adapters.patterns import PatternReader

_MOST_WARNINGS = 16

Names = str | tuple[str, ...] | None


def disagreements(config: LoraConfig, modules: Iterable[Module]) -> list[str]:
    """A sentence for each way in which `target_modules` and its relatives differ from `modules`.

    Raises AdapterError for a regular expression that is none, or too costly a one.
    """
    modules = list(modules)
    paths = [module.path for module in modules]
    reader = PatternReader(config.file)
    targeted = _matcher(reader, "target_modules", config.target_modules, default=True)
    excluded = _matcher(reader, "exclude_modules", config.exclude_modules, default=False)
    warnings = _unmatched(config.target_modules, targeted, paths)
    layers = config.layers_to_transform
    unnamed = [
        module.path
        for module in modules
        if excluded(module.path)
        or not targeted(module.path)
        or (layers is not None and module.layer not in layers)
    ]
    if unnamed:
        warnings.append(
            f"target_modules: {unnamed[0]} (first of {len(unnamed)}) is no target by the config "
            "but has weights in the file; they are applied"
        )
    return warnings


def _unmatched(names: Names, targeted: Callable[[str], bool], paths: list[str]) -> list[str]:
    if names is None or names == "all-linear":
        return []
    if isinstance(names, str):
        missing = [] if any(map(targeted, paths)) else [names]
    else:
        endings = {ending for path in paths for ending in _endings(path)}
        missing = [name for name in names if name not in endings]
    warnings = [
        f"target_modules: {show(name)} matches no tensor of the file"
        for name in missing[:_MOST_WARNINGS]
    ]
    if len(missing) > _MOST_WARNINGS:
        warnings.append(f"target_modules: {len(missing) - _MOST_WARNINGS} more match no tensor")
    return warnings


def _matcher(
    reader: PatternReader, key: str, names: Names, *, default: bool
) -> Callable[[str], bool]:
    """A string is one regular expression for the whole path; list entries are path endings."""
    if names is None or names == "all-linear":
        return lambda _: default
    if isinstance(names, str):
        pattern = reader.compile(key, names)
        return lambda path: pattern.fullmatch(path) is not None
    wanted = frozenset(names)
    return lambda path: not wanted.isdisjoint(_endings(path))


def _endings(path: str) -> Iterator[str]:
    """`a.b.c`, `b.c` and `c` of `a.b.c`."""
    parts = path.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))
