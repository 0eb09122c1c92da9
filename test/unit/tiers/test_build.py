"""Each switch takes away, or adds, what it says and nothing else; on real parts."""

from array import array

import pytest
from helpers_adapters import random_adapter
from helpers_residency import LAYOUT, SPEC, make, tiers_of

from sglang_graft.cache import State
from sglang_graft.pool import Owner
from sglang_graft.tiers import Residency, TierOptions, Wish

DEFAULT = TierOptions()


def with_adapters(options: TierOptions, count: int = 2) -> Residency:
    residency = make(options=options)
    for seed in range(count):
        residency.add(f"id-{seed}", f"{seed}", random_adapter(SPEC, {(0, "q_proj"): 4}, seed))
    tiers_of(residency).images.store.wait()
    return residency


def states(residency: Residency) -> list[State]:
    return [known.node.state for known in residency.known()]


def passes(residency: Residency, wishes: list[Wish], count: int = 4) -> None:
    tiers = tiers_of(residency)
    for _ in range(count):
        tiers.step(wishes)
        residency.tree.check_invariants()
        tiers.check_invariants()


def cache_two_pages(residency: Residency) -> None:
    tree = residency.tree
    pages = tree.ledger.take(2, Owner.KV_RUNNING)
    assert pages is not None
    tree.insert(tree.base, array("q", range(2 * LAYOUT.page_tokens)), pages, start=0)


@pytest.mark.parametrize(("options", "kept"), [(DEFAULT, 2), (TierOptions(host_kv=False), 0)])
def test_without_host_kv_only_images_are_in_the_host_pool(options: TierOptions, kept: int) -> None:
    residency = with_adapters(options)
    tree = residency.tree
    cache_two_pages(residency)
    passes(residency, [])
    tree.evict(tree.ledger.total)
    assert (tree.base.host_kv_pages, tree.dropped_pages) == (kept, 2 - kept)
    assert all(known.node.host for known in residency.known())


@pytest.mark.parametrize(("options", "begun"), [(DEFAULT, 2), (TierOptions(prefetch=False), 1)])
def test_without_prefetch_the_first_in_line_alone_has_loads_begun(
    options: TierOptions, begun: int
) -> None:
    residency = with_adapters(options)
    wishes = [Wish(k.adapter_id, k.node, array("q", [1])) for k in residency.known()]
    passes(residency, wishes)
    assert states(residency) == [State.RESIDENT] * begun + [State.ABSENT] * (2 - begun)


@pytest.mark.parametrize(
    ("options", "state"),
    [(DEFAULT, State.ABSENT), (TierOptions(idle_promotion=True), State.RESIDENT)],
)
def test_unasked_promotion_is_off_by_default(options: TierOptions, state: State) -> None:
    residency = with_adapters(options)
    passes(residency, [])
    assert states(residency) == [state] * 2
