"""Eviction policies: what a node is worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sglang_graft.cache.node import Node


class EvictionPolicy(Protocol):
    """Orders the victims: the smallest value leaves first, equal values by creation order.

    `value` reads only the node and the policy's own state, never wall time or randomness. While
    the tree's shape stays as it is, a node's value may rise but not fall: the victim heap looks
    at a node again only when the value it was pushed with reaches the top. A policy that changes
    its prices at large calls `UnifiedTree.reprice()` afterwards.
    """

    name: str

    def value(self, node: Node) -> float: ...


class Lru:
    """Least recently used, on the logical clock of the tree."""

    name = "lru"

    def value(self, node: Node) -> float:
        return node.last_use


_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {Lru.name: Lru}


def make_policy(name: str) -> EvictionPolicy:
    """The policy called `name`; ValueError names the known ones."""
    if name not in _POLICIES:
        known = ", ".join(sorted(_POLICIES))
        raise ValueError(f"--graft-policy: wanted one of {known}; got {name!r}")
    return _POLICIES[name]()
