"""The tenants file: YAML or JSON, one entry a tenant, checked as a whole."""

import re
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from sglang_graft.tenants.keys import HASH_PREFIX

MAX_BYTES = 2**20
MAX_TENANTS = 1024
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_HASH = re.compile(HASH_PREFIX + r"[0-9a-f]{64}")
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d+)?) ?%")


class TenantsError(ValueError):
    """The file cannot be used; the message names it, the tenant and the field.

    place: where in its content that is, the outermost key first; empty when it has no content.
    """

    def __init__(self, message: str, place: tuple[int | str, ...] = ()) -> None:
        super().__init__(message)
        self.place = place


def _pages(value: Any) -> Any:
    """A number of pages, or "20%" as the fraction 0.2 of the pool."""
    if isinstance(value, str):
        found = _PERCENT.fullmatch(value.strip())
        if found is None:
            raise ValueError('wanted a number of pages, or a share of the pool such as "20%"')
        return float(found[1]) / 100
    if isinstance(value, float):
        raise ValueError('wanted whole pages, or a share of the pool such as "20%"')
    return value


def _fits(value: int | float | None) -> int | float | None:
    if isinstance(value, float) and value > 1:
        raise ValueError("wanted at most 100%")
    if value is not None and value < 0:
        raise ValueError("wanted 0 pages or more")
    return value


Pages = Annotated[int | float, BeforeValidator(_pages), AfterValidator(_fits)]


class Tenant(BaseModel):
    """One tenant. Everything that is left out is denied, unlimited or 0."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    keys: tuple[str, ...] = Field(min_length=1)
    """Hashes of its API keys; several while one replaces another."""
    adapters: tuple[str, ...] = ()
    """Globs over adapter names and aliases; `*` stops at "/", `**` does not."""
    base: bool = False
    """Whether it may use the base model itself."""
    priority: int = 0
    """Whose requests go first, the larger number before the smaller."""
    requests_per_second: float | None = Field(default=None, gt=0)
    tokens_per_second: float | None = Field(default=None, gt=0)
    burst_seconds: float = Field(default=10.0, gt=0)
    """How many seconds' worth of both rates may come at once."""
    page_floor: Pages = 0
    page_cap: Pages | None = None
    share_kv: bool = False
    """Whether its prefix KV is shared with all other tenants that say so."""

    @field_validator("keys", "adapters", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("requests_per_second", "tokens_per_second", "burst_seconds", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if type(value) is not int:
            return value
        try:
            return float(value)
        except OverflowError:
            raise ValueError("wanted a smaller number") from None

    @field_validator("keys")
    @classmethod
    def _hashes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for place, key in enumerate(value):
            if not _HASH.fullmatch(key):
                raise ValueError(
                    f"entry {place + 1}: wanted sha256: and 64 hexadecimal digits, as"
                    " `graft tenants key` prints"
                )
        return value

    @field_validator("adapters")
    @classmethod
    def _globs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not glob or len(glob) > 256 for glob in value):
            raise ValueError("wanted names or globs of 1 to 256 characters")
        return value

    @model_validator(mode="after")
    def _together(self) -> "Tenant":
        if self.share_kv and self.page_floor:
            raise ValueError(
                "page_floor and share_kv exclude each other: shared KV belongs to no tenant,"
                " so no floor can hold it"
            )
        floor, cap = self.page_floor, self.page_cap
        if cap is not None and type(cap) is type(floor) and floor > cap:
            raise ValueError(f"page_floor {floor} is above page_cap {cap}")
        return self


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tenants: dict[str, Tenant] = Field(max_length=MAX_TENANTS)

    @field_validator("tenants")
    @classmethod
    def _names(cls, value: dict[str, Tenant]) -> dict[str, Tenant]:
        for name in value:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"tenant {name[:80]!r}: wanted a name of letters, digits, '_', '.' and '-',"
                    " at most 64 characters"
                )
        return value

    @model_validator(mode="after")
    def _one_owner(self) -> "_File":
        owners: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for key in tenant.keys:
                if owners.setdefault(key, name) != name or tenant.keys.count(key) > 1:
                    raise ValueError(f"tenant {name}: keys: one key is there twice ({owners[key]})")
        return self


def check(content: Any) -> dict[str, Tenant]:
    """Tenants by name from what a file holds. TenantsError says what is wrong, and at which place;
    it never has a value in it: a key may stand where none should."""
    if not isinstance(content, dict):
        raise TenantsError(f"wanted an entry `tenants:`, got {type(content).__name__}")
    try:
        return _File.model_validate(content).tenants
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise TenantsError(_told(first["loc"], first["msg"]), first["loc"]) from None


def parse(text: str, source: str) -> dict[str, Tenant]:
    """Tenants by name from YAML or JSON (which is YAML too). TenantsError for anything wrong."""
    try:
        return check(_load(text))
    except TenantsError as error:
        raise TenantsError(f"{source}: {error}", error.place) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise TenantsError(f"{source}: not YAML or JSON: {_one_line(error)}") from None


def read(path: Path) -> dict[str, Tenant]:
    """Tenants of a file. TenantsError also when it cannot be read."""
    try:
        with path.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise TenantsError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise TenantsError(f"{path}: wanted at most {MAX_BYTES} bytes")
    try:
        return parse(data.decode(), str(path))
    except UnicodeDecodeError:
        raise TenantsError(f"{path}: not UTF-8") from None


def _load(text: str) -> Any:
    """Plain YAML: no aliases, and no key twice, of which the first would vanish unseen."""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
        raise ValueError("YAML aliases are not read here")
    nodes = [yaml.compose(text, yaml.SafeLoader)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            _check_keys([key for key, _ in node.value])
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    return yaml.safe_load(text)


def _check_keys(keys: list[Any]) -> None:
    seen = set()
    for key in keys:
        if not isinstance(key, yaml.ScalarNode):
            continue  # safe_load says that it cannot be a key
        if key.value in seen:
            line = key.start_mark.line + 1
            raise ValueError(f"line {line}: {key.value[:80]!r} is there twice")
        seen.add(key.value)


def _told(place: tuple[int | str, ...], message: str) -> str:
    # Branches of a union have names of pydantic's own.
    where = [str(part) for part in place if part not in ("int", "float", "[key]")]
    if where[:1] == ["tenants"] and len(where) > 1:
        where = [f"tenant {where[1]}", *where[2:]]
    return ": ".join([*where, message.removeprefix("Value error, ")])


def _one_line(error: Exception) -> str:
    """Where it is wrong; never the text there."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}: {getattr(error, 'problem', '')}"
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
