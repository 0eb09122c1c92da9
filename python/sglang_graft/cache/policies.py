"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from sglang_graft.cache.cost import Cost, Prices
from sglang_graft.cache.elora import Elora
from sglang_graft.cache.policy import EvictionPolicy, Lru

_POLICIES: dict[str, Callable[[Prices], EvictionPolicy]] = {
    Cost.name: Cost,
    Elora.name: Elora,
    Lru.name: lambda prices: Lru(),
}


def policy_names() -> list[str]:
    """Every name that `make_policy` takes."""
    return sorted(_POLICIES)


def make_policy(name: str, prices: Prices | None = None) -> EvictionPolicy:
    """The policy called `name`, going by `prices`; ValueError names the known ones."""
    if name not in _POLICIES:
        known = ", ".join(policy_names())
        raise ValueError(f"--graft-policy: wanted one of {known}; got {name!r}")
    return _POLICIES[name](prices or Prices())
