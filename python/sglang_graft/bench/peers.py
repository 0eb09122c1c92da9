"""Who is measured: `stock:8,16`, `base`, `graft:cost,no-host-kv+no-prefetch`, and their flags."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sglang_graft.cache import policy_names
from sglang_graft.config import GraftConfig, option_table

Engine = Literal["stock", "base", "graft"]

BASE_TRAFFIC = "base-traffic"
"""A part of a variant: the same server, but every request asks the base model."""

# What the protocol calls an ablation -> the option of the server that comes nearest to it.
ALIASES = {"no-host-tier": "no-host-kv"}
_HOST_GB = "host-memory-gb="
_POLICY = "--graft-policy"


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to serve. `slots`: of a static split; `flags`: beyond those that every peer gets."""

    label: str
    engine: Engine
    slots: int = 0
    flags: tuple[str, ...] = ()
    base_traffic: bool = False

    @property
    def slug(self) -> str:
        """The label as a part of a file's name."""
        return self.label.replace(":", "-").replace("+", "_").replace("=", "")


def parse_peers(texts: Iterable[str]) -> list[Peer]:
    """Peers in the order given, each one once.

    ValueError names what was wanted.
    """
    found: dict[str, Peer] = {}
    for text in texts:
        engine, _, variants = text.partition(":")
        for variant in variants.split(",") if variants else [""]:
            peer = _peer(engine, variant)
            found.setdefault(peer.label, peer)
    if not found:
        raise ValueError("--peer: wanted at least one of stock:SLOTS, base, graft:VARIANT")
    return list(found.values())


def _peer(engine: str, variant: str) -> Peer:
    label = f"{engine}:{variant}" if variant else engine
    parts = [part for part in variant.split("+") if part != BASE_TRAFFIC]
    base_traffic = len(parts) < len(variant.split("+"))
    if engine == "base" and not variant:
        return Peer("base", "base", base_traffic=True)
    if engine == "stock":
        if len(parts) != 1 or not parts[0].isdigit() or int(parts[0]) < 1:
            raise ValueError(f"--peer: wanted stock:SLOTS, such as stock:8,16; got {label!r}")
        return Peer(label, "stock", slots=int(parts[0]), base_traffic=base_traffic)
    if engine == "graft":
        flags = tuple(flag for part in parts if part for flag in _graft_flags(part, label))
        if _POLICY not in flags:  # said always: a result shall not depend on what the default was
            flags = (_POLICY, GraftConfig().policy, *flags)
        return Peer(label, "graft", flags=flags, base_traffic=base_traffic)
    raise ValueError(f"--peer: wanted stock:SLOTS, base or graft:VARIANT, got {label!r}")


def _graft_flags(part: str, label: str) -> tuple[str, ...]:
    switches = {
        row.flag.removeprefix("--graft-"): row.flag
        for row in option_table()
        if row.default is False and row.flag.startswith("--graft-")
    }
    if part in policy_names():
        return (_POLICY, part)
    if ALIASES.get(part, part) in switches:
        return (switches[ALIASES.get(part, part)],)
    if part.startswith(_HOST_GB):
        return ("--graft-host-memory-gb", part.removeprefix(_HOST_GB))
    known = [*policy_names(), *switches, *ALIASES, f"{_HOST_GB}N", BASE_TRAFFIC]
    raise ValueError(f"--peer {label}: wanted parts out of {', '.join(known)}; got {part!r}")
