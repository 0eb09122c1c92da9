"""The one table of Graft's options: flag, environment name, type, default, unit and meaning.

A flag wins over its environment name. The resolved options travel to the scheduler processes as
JSON in `CONFIG_ENV`; nothing else reads the environment.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.config import JsonDict

CONFIG_ENV = "GRAFT_CONFIG"
"""Carries the resolved options from the main process to the processes that it starts."""


def _option(
    default: Any, flag: str, meaning: str, unit: str = "", *, repeats: bool = False, **limits: Any
) -> Any:
    env = flag.removeprefix("--").upper().replace("-", "_")
    if not env.startswith("GRAFT_"):
        env = "GRAFT_" + env.replace("_GRAFT", "")
    extra: JsonDict = {"flag": flag, "env": env, "unit": unit, "repeats": repeats}
    return Field(default=default, description=meaning, json_schema_extra=extra, **limits)


class GraftConfig(BaseModel):
    """Graft's own options. SGLang's flags keep their names and meanings beside them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable: bool = _option(
        False, "--enable-graft", "Serve adapters and KV from one pool (turns LoRA on by itself)."
    )
    policy: str = _option(
        "cost", "--graft-policy", "Which node leaves first when the pool is full."
    )
    check: bool = _option(
        False,
        "--graft-check",
        "Check all invariants of tree and pool after each change (slow; for tests, bug reports).",
    )
    adapter_root: str = _option(
        "",
        "--graft-adapter-root",
        "Folders below which requests may name adapters, loaded on first use; the only place that"
        " /load_lora_adapter then reads. Several: give the flag again, or separate by colons.",
        repeats=True,
    )
    adapter_scan_seconds: float = _option(
        2.0,
        "--graft-adapter-scan-seconds",
        "Time between two looks at the roots; a folder counts once two looks have seen the same.",
        "s",
        gt=0,
    )
    max_adapters: int = _option(
        4096, "--graft-max-adapters", "How many adapters may be loaded at once.", ge=1
    )
    max_adapter_mb: int = _option(
        16384, "--graft-max-adapter-mb", "Largest adapter folder that is read.", "MiB", ge=1
    )

    tenants: str = _option(
        "",
        "--graft-tenants",
        "File with tenants: API keys, adapters, rates, page floors and caps; read again when it"
        " changes.",
    )

    @property
    def adapter_roots(self) -> tuple[Path, ...]:
        """The folders of `adapter_root`, as given."""
        return tuple(Path(part) for part in self.adapter_root.split(os.pathsep) if part)

    host_memory_gb: float = _option(
        0.0,
        "--graft-host-memory-gb",
        "Host memory for adapter images and KV; 0: two fifths of what is free, at most two pools.",
        "GiB",
        ge=0,
    )
    no_host_kv: bool = _option(
        False, "--graft-no-host-kv", "Keep no KV in host memory: what leaves the device is gone."
    )
    no_prefetch: bool = _option(
        False, "--graft-no-prefetch", "Begin loads for the first waiting request only."
    )
    idle_promotion: bool = _option(
        False,
        "--graft-idle-promotion",
        "While nobody waits, bring what was used last back into free pages.",
    )
    metrics_adapters: int = _option(
        20,
        "--graft-metrics-adapters",
        "How many adapters have a label of their own in /metrics; the others share one.",
        ge=0,
    )
    warm: str = _option(
        "",
        "--graft-warm",
        "Adapters, with commas, that answer a request before the server is ready; all: those of"
        " --lora-paths.",
    )
    drain_seconds: float = _option(
        30.0,
        "--graft-drain-seconds",
        "How long a drain (SIGTERM, or POST /graft/drain) waits for requests under way.",
        "s",
        ge=0,
    )
    drain_notice_seconds: float = _option(
        0.0,
        "--graft-drain-notice-seconds",
        "How long of that new requests are still taken, while /health/ready says 503 already.",
        "s",
        ge=0,
    )
    request_log: str = _option(
        "",
        "--graft-request-log",
        "Where one JSON line for each finished request goes: stderr, or a file.",
    )


class OptionInfo(BaseModel):
    """One row of the option table, as flags, `graft doctor` and the documents show it."""

    name: str
    flag: str
    env: str
    default: bool | int | float | str
    unit: str
    meaning: str
    repeats: bool = False


def option_table() -> list[OptionInfo]:
    """Every option, in the order in which `GraftConfig` declares them."""
    rows = []
    for name, field in GraftConfig.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict), f"option {name} has no flag and environment name"
        rows.append(
            OptionInfo(
                name=name,
                flag=str(extra["flag"]),
                env=str(extra["env"]),
                default=field.default,
                unit=str(extra["unit"]),
                meaning=field.description or "",
                repeats=bool(extra["repeats"]),
            )
        )
    return rows


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str]) -> GraftConfig:
    """Options from parsed `flags` (by option name), then the environment, then defaults.

    Raises ValueError that names the flag and the environment name of a bad value.
    """
    values: dict[str, Any] = {}
    for row in option_table():
        if row.name in flags:
            values[row.name] = flags[row.name]
        elif environ.get(row.env):  # a variable set to nothing is not set
            values[row.name] = environ[row.env]
    try:
        return GraftConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        row = next(row for row in option_table() if row.name == first["loc"][0])
        raise ValueError(
            f"{row.flag} (or {row.env}): {first['msg']}, got {first['input']!r}"
        ) from None


def publish(config: GraftConfig) -> None:
    """Hand `config` to the processes that this one starts; a disabled one is taken away."""
    if config.enable:
        os.environ[CONFIG_ENV] = config.model_dump_json()
    else:
        os.environ.pop(CONFIG_ENV, None)


def published() -> GraftConfig | None:
    """The options that a parent process published, or None where Graft is off."""
    text = os.environ.get(CONFIG_ENV)
    return None if text is None else GraftConfig.model_validate_json(text)
