"""One tree over adapters and prefix KV, and the order in which they are evicted."""

from sglang_graft.cache.host import HostTier
from sglang_graft.cache.node import AdapterNode, HostCopy, Insertion, Match, Node, State
from sglang_graft.cache.policy import EvictionPolicy, Lru, make_policy
from sglang_graft.cache.tree import UnifiedTree

__all__ = [
    "AdapterNode",
    "EvictionPolicy",
    "HostCopy",
    "HostTier",
    "Insertion",
    "Lru",
    "Match",
    "Node",
    "State",
    "UnifiedTree",
    "make_policy",
]
