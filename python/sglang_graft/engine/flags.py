"""Graft's flags, and what `--enable-graft` sets in SGLang's own.

Targets (0.5.17): `ServerArgs.add_cli_args`, where the parser is built, and
`ServerArgs.__post_init__`, where every way to start a server (launch_server, `sglang serve`,
Engine) resolves its arguments. Flags reach `__post_init__` through argparse actions that record
them, so that a flag which parses can never be ignored.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_graft import config
from sglang_graft.cache import make_policy
from sglang_graft.engine import refusals, tenant_start
from sglang_graft.engine.hooks import Hook, verify
from sglang_graft.engine.page_size import default_page_size

BACKEND = "graft"
DEFAULT_SLOTS = 64
SGLANG_DEFAULT_SLOTS = 8
DEFAULT_MAX_RANK = 256
_flags: dict[str, Any] = {}


def _record(dest: str, value: Any) -> None:
    verify(HOOKS)
    _flags[_options()[dest].name] = value


def _options() -> dict[str, config.OptionInfo]:
    """The option table by argparse destination, which SGLang's --config files use as keys."""
    return {row.flag.strip("-").replace("-", "_"): row for row in config.option_table()}


# Subclasses of argparse's own two actions, because SGLang's --config reader knows no others.
class _Switch(argparse._StoreTrueAction):
    """Keep a switch of ours; SGLang copies only its own fields out of the namespace."""

    def __call__(self, *_: Any, **__: Any) -> None:
        _record(self.dest, True)


class _Value(argparse._StoreAction):
    """Keep a value of ours; those of a flag that repeats are kept as one search path."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if not isinstance(values, list):
            _record(self.dest, values)
            return
        before = _flags.get(_options()[self.dest].name)
        _record(self.dest, os.pathsep.join([before, *values] if before else values))


def add_flags(result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER `add_cli_args`: one option for each row of the option table."""
    _flags.clear()  # a new command line owes nothing to one that this process parsed before
    group = parser.add_argument_group("graft")
    for dest, row in _options().items():
        more: dict[str, Any] = {"nargs": "+"} if row.repeats else {}
        default = "none" if row.default == "" else row.default
        group.add_argument(
            row.flag,
            action=_Switch if isinstance(row.default, bool) else _Value,
            dest=dest,
            default=argparse.SUPPRESS,
            help=f"{row.meaning} Default {default}; environment {row.env}.",
            **more,
        )


def resolve_arguments(original: Callable[[Any], None], server_args: Any) -> None:
    """AROUND `__post_init__`: choose Graft's parts before SGLang resolves the rest."""
    chosen = config.resolve(_flags, os.environ)
    config.publish(chosen)
    if not chosen.enable:
        original(server_args)
        return
    verify(HOOKS)
    _check_roots(chosen)
    tenants = tenant_start.check(chosen.tenants, server_args) if chosen.tenants else None
    _check_drain(chosen)
    make_policy(chosen.policy)  # a wrong name shall not wait for the scheduler process to be found
    refusals.check_requested(server_args)
    _set_defaults(server_args)
    original(server_args)
    refusals.check_resolved(server_args)
    _check_count(chosen, server_args)
    # Imported here, because it imports SGLang's HTTP server, which needs none of this at a start
    # without Graft.
    from sglang_graft.serving import request_log
    from sglang_graft.serving.install import install

    request_log.check_target(chosen.request_log)
    install(None if tenants is None else (Path(chosen.tenants), tenants))


def _check_roots(chosen: config.GraftConfig) -> None:
    for root in chosen.adapter_roots:
        if not root.is_dir():
            raise ValueError(f"--graft-adapter-root: wanted folders, got {str(root)!r}")


def _check_drain(chosen: config.GraftConfig) -> None:
    if chosen.drain_notice_seconds > chosen.drain_seconds:
        raise ValueError(
            f"--graft-drain-notice-seconds: wanted at most the {chosen.drain_seconds:g} of"
            f" --graft-drain-seconds, got {chosen.drain_notice_seconds:g}"
        )


def _check_count(chosen: config.GraftConfig, server_args: Any) -> None:
    count = len(server_args.lora_paths or ())
    if count > chosen.max_adapters:
        raise ValueError(
            f"--lora-paths: wanted at most {chosen.max_adapters} adapters, got {count};"
            " raise --graft-max-adapters"
        )


def _set_defaults(server_args: Any) -> None:
    server_args.enable_lora = True
    server_args.lora_backend = BACKEND
    server_args.radix_cache_backend = BACKEND
    # SGLang wants these two when no adapter is named at start. Slots hold pointers, not weights,
    # so a generous rank costs a few KB; a user's own, tighter limits stay in force.
    server_args.max_lora_rank = server_args.max_lora_rank or DEFAULT_MAX_RANK
    server_args.lora_target_modules = server_args.lora_target_modules or ["all"]
    if server_args.max_loras_per_batch == SGLANG_DEFAULT_SLOTS:
        # SGLang's default cannot be told from a user's own 8. Its slots hold padded weights, ours
        # hold pointers: the wider bound takes no room from anybody, and any other number stays.
        server_args.max_loras_per_batch = DEFAULT_SLOTS
    if server_args.page_size is None:
        server_args.page_size = default_page_size(server_args)
    if not torch.cuda.is_available():
        _disable_graphs(server_args)


def _disable_graphs(server_args: Any) -> None:
    for phase in ("decode", "prefill"):
        field = f"cuda_graph_backend_{phase}"
        asked = getattr(server_args, field)
        if asked not in (None, "disabled"):
            raise ValueError(
                f"--cuda-graph-backend-{phase}: wanted 'disabled' where no CUDA device is, got"
                f" {asked!r}; leave it out"
            )
        setattr(server_args, field, "disabled")


HOOKS = (
    Hook(
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        kind="after",
        function=add_flags,
        parameters=("parser",),
        reason="Graft's flags",
    ),
    Hook(
        target="sglang.srt.server_args.ServerArgs.__post_init__",
        kind="around",
        function=resolve_arguments,
        parameters=("self",),
        reason="choose Graft's backends, and refuse what cannot be served exactly",
    ),
)


def add_backend_choice() -> None:
    """Let `--lora-backend graft` pass the parser's list of choices."""
    from sglang.srt.server_args import LORA_BACKEND_CHOICES

    if BACKEND not in LORA_BACKEND_CHOICES:
        LORA_BACKEND_CHOICES.append(BACKEND)
