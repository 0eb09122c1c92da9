"""The file of `graft sync`: a server's adapters, the aliases that lead to them, its tenants."""

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sglang_graft import tenants


class SyncFileError(ValueError):
    """The file cannot be used; the message names file, line and field."""


class Prompt(BaseModel):
    """A warm-up prompt, whose answer must come before an alias leads to its adapter."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = Field(min_length=1)
    max_tokens: int = Field(8, ge=1, le=4096)


def _as_prompt(value: Any) -> Any:
    return {"text": value} if isinstance(value, str) else value


def _as_mapping(value: Any) -> Any:
    """`legal:` with nothing behind it is an adapter with every default."""
    return {} if value is None else value


class WantedAdapter(BaseModel):
    """One adapter. Without `path` it is a folder's name below --graft-adapter-root."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = Field(None, min_length=1)
    pinned: bool = False
    ttl_seconds: float | None = Field(None, gt=0, allow_inf_nan=False)
    priority: int = Field(0, ge=-16, le=16)
    warm: Literal["device", "host"] | None = None
    warmup: list[Annotated[Prompt, BeforeValidator(_as_prompt)]] = []

    def settings(self) -> dict[str, Any]:
        """What a PATCH of /graft/adapters sets."""
        return self.model_dump(include={"pinned", "ttl_seconds", "priority"})


class Desired(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    adapters: dict[str, Annotated[WantedAdapter, BeforeValidator(_as_mapping)]] = {}
    aliases: dict[str, str] = {}
    tenants: dict[str, Any] | None = None
    """All tenants, as in a tenants file; None leaves the server's as they are."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Plain data only, and no key twice: PyYAML would take the last one and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """As SafeLoader; raises ConstructorError for a key that was there before."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return found


def read_file(file: Path) -> Desired:
    """Read and check the file; relative paths in it start at its own folder."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SyncFileError(f"{file}: {error}") from None
    return parse(text, file)


def parse(text: str, file: Path) -> Desired:
    """Check the text of `file`. Raises SyncFileError."""
    try:
        data = yaml.load(text, Loader=_Loader)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = 0 if mark is None else mark.line + 1
        raise SyncFileError(f"{file}, line {line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise SyncFileError(f"{file}: {error}") from None
    data = _as_mapping(data)
    _check_tenants(data, root, file)
    try:
        desired = Desired.model_validate(data)
    except ValidationError as error:
        raise SyncFileError("\n".join(_told(error, root, file))) from None
    _check_aliases(desired, root, file)
    return _with_whole_paths(desired, file)


def _check_tenants(data: Any, root: Any, file: Path) -> None:
    """By the rules of a tenants file, whose messages have no values: one could be a key."""
    if not isinstance(data, dict) or "tenants" not in data:
        return
    try:
        tenants.check({"tenants": data["tenants"]})
    except tenants.TenantsError as error:
        raise SyncFileError(f"{file}, line {_line(root, error.place)}: {error}") from None


def _check_aliases(desired: Desired, root: Any, file: Path) -> None:
    for alias, target in desired.aliases.items():
        where = f"{file}, line {_line(root, ('aliases', alias))}: aliases.{alias}"
        if alias in desired.adapters:
            raise SyncFileError(f"{where}: an adapter has that name too")
        if target in desired.aliases:
            raise SyncFileError(f"{where}: {target!r} is an alias; wanted the name of an adapter")


def _with_whole_paths(desired: Desired, file: Path) -> Desired:
    folder = file.absolute().parent
    adapters = {
        name: wanted
        if wanted.path is None
        else wanted.model_copy(update={"path": str(folder / wanted.path)})
        for name, wanted in desired.adapters.items()
    }
    return desired.model_copy(update={"adapters": adapters})


def _told(error: ValidationError, root: Any, file: Path) -> Iterator[str]:
    for one in error.errors():
        place = one["loc"]
        field = ".".join(map(str, place)) or "the whole file"
        yield f"{file}, line {_line(root, place)}: {field}: {one['msg']}, got {one['input']!r}"


def _line(node: Any, place: tuple[int | str, ...]) -> int:
    """The line of a field, or of the nearest thing around it that is in the file."""
    line = 1 if node is None else node.start_mark.line + 1
    for part in place:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(part):
                    line, node = key.start_mark.line + 1, value
                    break
            else:
                return int(line)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            return int(line)
    return int(line)
