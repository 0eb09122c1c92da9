"""The full walk that proves the host side of a tree consistent with its ledger."""

from __future__ import annotations

from sglang_graft.cache.host import HostTier
from sglang_graft.cache.node import AdapterNode, Node
from sglang_graft.pool.ledger import Owner


def check(host: HostTier, nodes: list[Node]) -> None:
    """Assert every invariant of the host side; `nodes` are all nodes of the tree."""
    host.ledger.check_invariants()
    _check_pages(host, nodes)
    _check_order(host, nodes)
    for adapter in nodes:
        if isinstance(adapter, AdapterNode):
            _check_adapter(adapter, nodes)


def _check_pages(host: HostTier, nodes: list[Node]) -> None:
    held = [page for node in nodes if node.host for page in node.host.pages]
    assert len(held) == len(set(held)), "a host page is in two nodes"
    both = host._orphans.intersection(held)
    assert not both, f"host pages {sorted(both)} are orphans and in a node"
    used = host.ledger.total - host.ledger.free
    assert used == len(held) + len(host._orphans), (
        f"{used} host pages are taken, nodes hold {len(held)}, {len(host._orphans)} are orphans"
    )
    for page in host._orphans:
        owner = host.ledger.owner_of(page)
        assert owner is Owner.IN_FLIGHT, f"orphan {page} is {owner.name}"
    for page, readers in host._readers.items():
        assert readers > 0, f"host page {page} has {readers} readers"
        assert page in host._orphans or page in held, f"host page {page} is read, and nobody's"
    for node in nodes:
        _check_owner(host, node)
        _check_path(node)


def _check_path(node: Node) -> None:
    parent = node.parent
    if node.host and parent is not None and parent is not node.adapter:
        assert parent.host, f"node {node.serial} has a host copy, its parent has none"


def _check_owner(host: HostTier, node: Node) -> None:
    wanted = Owner.ADAPTER if node is node.adapter else Owner.KV_CACHED
    for page in node.host.pages if node.host else ():
        owner = host.ledger.owner_of(page)
        assert owner in (wanted, Owner.IN_FLIGHT), f"host page {page} is {owner.name}"
        assert owner is wanted or page not in host._readers, f"host page {page} is read too early"


def _check_adapter(adapter: AdapterNode, nodes: list[Node]) -> None:
    name = f"adapter {adapter.identity!r}"
    found = sum(
        len(node.host.pages)
        for node in nodes
        if node.host and node.adapter is adapter and node is not adapter
    )
    assert found == adapter.host_kv_pages, (
        f"{name}: {found} host KV pages, counter says {adapter.host_kv_pages}"
    )
    assert not (adapter.dropped and adapter.host), f"{name} is dropped, and keeps its image"


def _check_order(host: HostTier, nodes: list[Node]) -> None:
    live = host._live()
    dead = len(host._heap) - len(live)
    assert dead == host._dead, f"host order: {dead} dead entries, the counter says {host._dead}"
    for value, serial, _, node in live:
        now = host._policy.host_value(node)
        assert value <= now, f"host copy of {serial}: value fell from {value} to {now} unseen"
    ordered = {entry[1] for entry in live}
    missing = {node.serial for node in nodes if node.is_host_victim()} - ordered
    assert not missing, f"only copies {sorted(missing)} are not in the order of victims"
    twice = {node.serial for node in nodes if node.host and node.pages}
    listed = {*host._kv_twice, *host._images_twice}
    assert twice == listed, f"nodes {sorted(twice ^ listed)} are on both sides, or listed so"
