"""One tree over adapters and prefix KV, and the order in which they are evicted."""

from sglang_graft.cache.cost import Cost, Prices
from sglang_graft.cache.departures import Departure, Departures, Reason
from sglang_graft.cache.elora import Elora
from sglang_graft.cache.forecast import Forecast, Loss, forecast
from sglang_graft.cache.host import HostTier
from sglang_graft.cache.node import AdapterNode, HostCopy, Insertion, Match, Node, State
from sglang_graft.cache.policies import make_policy, policy_names
from sglang_graft.cache.policy import EvictionPolicy, Lru
from sglang_graft.cache.rates import RateMeter, Rates
from sglang_graft.cache.tree import UnifiedTree

__all__ = [
    "AdapterNode",
    "Cost",
    "Departure",
    "Departures",
    "Elora",
    "EvictionPolicy",
    "Forecast",
    "HostCopy",
    "HostTier",
    "Insertion",
    "Loss",
    "Lru",
    "Match",
    "Node",
    "Prices",
    "RateMeter",
    "Rates",
    "Reason",
    "State",
    "UnifiedTree",
    "forecast",
    "make_policy",
    "policy_names",
]
