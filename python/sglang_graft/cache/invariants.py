"""The full walk that proves a unified tree consistent with itself and with its ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_graft.cache import host_invariants, shares
from sglang_graft.cache.departures import Reason
from sglang_graft.cache.node import AdapterNode, Node, State
from sglang_graft.cache.runs import below
from sglang_graft.pool.ledger import Owner

if TYPE_CHECKING:
    from sglang_graft.cache.tree import UnifiedTree

_OWNER_OF_WEIGHTS = {State.LOADING: Owner.IN_FLIGHT, State.RESIDENT: Owner.ADAPTER}


def check(tree: UnifiedTree) -> None:
    """Assert every invariant of the tree; the message names the node and the numbers."""
    adapters = [*tree._adapters.values(), *tree._leaving.values()]
    nodes: list[Node] = []
    for adapter in adapters:
        _check_adapter(tree, adapter)
        inner = list(below(adapter))
        for node in inner:
            _check_kv_node(tree, adapter, node)
        found = sum(len(node.pages) for node in inner)
        assert found == adapter.kv_pages, (
            f"{adapter.identity!r}: {found} KV pages, counter says {adapter.kv_pages}"
        )
        nodes += [adapter, *inner]
    for node in nodes:
        _check_locks(node)
        _check_device_children(node)
    _check_registry(tree)
    _check_pages(tree, adapters, nodes)
    _check_victims(tree, nodes)
    _check_departures(tree)
    shares.check(tree.shares, nodes, tree.leaves_whole)
    if tree.host is None:
        assert not any(node.host for node in nodes), "host copies without a host tier"
    else:
        host_invariants.check(tree.host, nodes)


def _check_departures(tree: UnifiedTree) -> None:
    tree.departures.check_invariants()
    evicted = {
        (weights, field): sum(
            count[field]
            for (reason, of_weights), count in tree.departures.counts.items()
            if of_weights == weights and reason not in (Reason.UNLOAD, Reason.FLUSH)
        )
        for weights in (True, False)
        for field in (0, 1)
    }
    gone = tree.demoted_pages + tree.dropped_pages
    assert evicted[False, 1] == gone, f"{gone} pages of KV were evicted, noted {evicted[False, 1]}"
    assert evicted[True, 0] == tree.evicted_adapters, (
        f"{tree.evicted_adapters} adapters were evicted, noted {evicted[True, 0]}"
    )


def _check_registry(tree: UnifiedTree) -> None:
    for identity, adapter in tree._adapters.items():
        assert adapter.identity == identity, f"{adapter.identity!r} is listed as {identity!r}"
        assert not adapter.dropped, f"dropped adapter {identity!r} is still known"
    for serial, adapter in tree._leaving.items():
        assert adapter.serial == serial, f"node {adapter.serial} is listed as {serial}"
        assert adapter.dropped, f"adapter {adapter.identity!r} leaves without a drop"
        assert adapter.lock > 0, f"adapter {adapter.identity!r} is dropped and free, but still here"
    base = tree._adapters[None]
    assert base is tree.base, "the base model's node was exchanged"
    assert base.state is State.RESIDENT, f"the base model is {base.state.value}"


def _check_adapter(tree: UnifiedTree, adapter: AdapterNode) -> None:
    name = f"adapter {adapter.identity!r}"
    assert adapter.parent is None, f"{name} has a parent"
    assert adapter.adapter is adapter, f"{name} is not its own adapter"
    assert adapter.last_use <= tree._clock, f"{name} was used at {adapter.last_use}, in the future"
    if adapter.state is State.ABSENT:
        assert not adapter.pages, f"{name} is absent with pages {adapter.pages}"
        assert not adapter.kv_pages, f"{name} is absent with {adapter.kv_pages} KV pages below it"
        return
    assert len(adapter.pages) == adapter.weight_pages, (
        f"{name}: {len(adapter.pages)} pages of {adapter.weight_pages}"
    )
    _check_owner(tree, adapter, _OWNER_OF_WEIGHTS[adapter.state])


def _check_kv_node(tree: UnifiedTree, adapter: AdapterNode, node: Node) -> None:
    name, parent, page_bytes = f"node {node.serial}", node.parent, tree._page_bytes
    assert parent is not None, f"{name} has no parent"
    assert parent.children.get(node.edge) is node, f"{name} is not what its parent lists"
    assert node.adapter is adapter, f"{name} names another adapter than the one above it"
    assert node.pages or node.host, f"{name} has no pages"
    for pages in (node.pages, node.host.pages if node.host else []):
        assert not pages or len(node.key) == len(pages) * page_bytes, (
            f"{name}: {len(node.key)} bytes of tokens for {len(pages)} pages"
        )
    assert not node.pages or parent.pages or parent is adapter, f"{name}: its parent left first"
    assert not node.lock or tree.is_landed(node), f"{name} is locked, and not on the device"
    first = node.key[:page_bytes]
    plain = node.edge[:page_bytes] if parent is adapter else node.edge
    assert plain == first, f"{name} is not listed under its first page"
    start = parent.start + len(parent.key) // page_bytes
    assert node.start == start, f"{name} starts at page {node.start}, its parent ends at {start}"
    assert node.last_use <= parent.last_use, (
        f"{name} was used at {node.last_use}, its parent at {parent.last_use}"
    )
    if node.pages:
        landed = tree.is_landed(node)
        _check_owner(tree, node, Owner.KV_CACHED if landed else Owner.IN_FLIGHT)
        assert landed or node.host, f"{name} is on its way from a host copy that it has not"


def _check_owner(tree: UnifiedTree, node: Node, owner: Owner) -> None:
    for page in node.pages:
        actual = tree.ledger.owner_of(page)
        assert actual == owner, (
            f"node {node.serial}: page {page} is {actual.name}, not {owner.name}"
        )


def _check_locks(node: Node) -> None:
    assert node.lock >= 0, f"node {node.serial} is locked {node.lock} times"
    inner = sum(child.lock for child in node.children.values())
    assert node.lock >= inner, f"node {node.serial}: {node.lock} locks, {inner} below it"


def _check_device_children(node: Node) -> None:
    found = sum(bool(child.pages) for child in node.children.values())
    assert node.device_children == found, (
        f"node {node.serial}: {found} children on the device, counter says {node.device_children}"
    )


def _check_pages(tree: UnifiedTree, adapters: list[AdapterNode], nodes: list[Node]) -> None:
    ledger = tree.ledger
    pages = [page for node in nodes for page in node.pages]
    assert len(pages) == len(set(pages)), "a page is in two nodes"
    kv = [node for node in nodes if node is not node.adapter and node.pages]
    cached = sum(len(node.pages) for node in kv if tree.is_landed(node))
    assert cached == ledger.count(Owner.KV_CACHED), (
        f"the tree holds {cached} KV pages, the ledger has {ledger.count(Owner.KV_CACHED)}"
    )
    for state, owner in _OWNER_OF_WEIGHTS.items():
        held = sum(len(adapter.pages) for adapter in adapters if adapter.state is state)
        if owner is Owner.IN_FLIGHT:
            held += sum(len(node.pages) for node in kv) - cached
        assert held == ledger.count(owner), (
            f"{held} pages of {state.value} nodes, the ledger has {ledger.count(owner)}"
        )
    evictable = sum(len(node.pages) for node in nodes if node.lock == 0)
    protected = len(pages) - evictable
    assert evictable == tree.evictable, f"{evictable} evictable, counter says {tree.evictable}"
    assert protected == tree.protected, f"{protected} protected, counter says {tree.protected}"
    whole = ledger.free + evictable + protected + ledger.count(Owner.KV_RUNNING)
    assert whole == ledger.total, f"{whole} pages are accounted for, of {ledger.total}"
    assert tree.invalid_kv_pages() == 0, f"{tree.invalid_kv_pages()} pages of invalid KV"


def _check_victims(tree: UnifiedTree, nodes: list[Node]) -> None:
    serials = {node.serial for node in nodes}
    assert len(serials) == len(nodes), "two nodes have one serial"
    tree._victims.check_invariants()
    live = tree._victims.live_serials()
    assert live <= serials, f"the victim heap keeps nodes that are gone: {sorted(live - serials)}"
    missing = {node.serial for node in nodes if node.is_victim()} - live
    assert not missing, f"evictable leaves {sorted(missing)} are not in the victim heap"
