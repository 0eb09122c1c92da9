"""Which weights a registration of an adapter leads to, for the HTTP process."""

from typing import Any


def identities(scheduler: Any, _: dict[str, Any]) -> dict[str, Any]:
    """Identity by adapter id, of adapters with a name and of those that wait for their requests."""
    residency = scheduler.tree_cache.residency
    known = (*residency.known(), *residency.retired())
    return {adapter.adapter_id: adapter.node.identity for adapter in known}


OPERATIONS = {"identities": identities}
