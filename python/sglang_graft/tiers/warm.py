"""Adapters that an operator wants nearer, though no request waits for them.

Each call takes the next step and returns at once; the caller asks again until it is `DONE`.
"""

from __future__ import annotations

import enum

from sglang_graft.cache import AdapterNode, Forecast, State, forecast
from sglang_graft.tiers.tiers import Tiers


class Step(enum.Enum):
    """How far an adapter has come."""

    DONE = "done"
    COMING = "coming"  # it is being read or copied, or waits for room in the host pool
    NO_ROOM = "no room"  # on the device, now


def to_host(tiers: Tiers, node: AdapterNode, failures_seen: int) -> Step:
    """An image in the host pool.

    ValueError when it could not be read since `images.failed` was `failures_seen`.
    """
    host = tiers.tree.host
    assert host is not None, "tiers need a host tier"
    if node.host is not None:
        return Step.DONE if host.is_readable(node) else Step.COMING
    failure = tiers.images.failure(node)
    if failure is not None and failure.number > failures_seen:
        raise ValueError(failure.message)
    tiers.images.want(node, *tiers.prefetch.paths(node))
    return Step.COMING


def to_device(tiers: Tiers, node: AdapterNode, failures_seen: int) -> Step:
    """Weights on the device.

    Takes nothing of the ledger's reserve, which is promised to running requests, and evicts nothing
    that a waiting one wants. ValueError as in `to_host`.
    """
    if node.state is not State.ABSENT:
        return Step.DONE if node.state is State.RESIDENT else Step.COMING
    if to_host(tiers, node, failures_seen) is not Step.DONE:
        return Step.COMING
    held = tiers.prefetch.wanted()
    for wanted in held:
        tiers.tree.lock(wanted)
    pages = tiers.tree.load(node, use_reserve=False)
    for wanted in held:
        tiers.tree.unlock(wanted)
    if pages is None:
        return Step.NO_ROOM
    tiers.transfers.load(node)
    tiers.counters.add(node.identity, loads=1, pages_to_device=len(pages))
    return Step.COMING


def look_ahead(tiers: Tiers, pages: int) -> Forecast:
    """What `to_device` would evict for an absent adapter of `pages` pages. Changes nothing."""
    return forecast(tiers.tree, pages, use_reserve=False, held=tiers.prefetch.wanted())
