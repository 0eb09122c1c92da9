"""Steps of the tree's stories, on trees of 2 tokens a page."""

from array import array

from sglang_graft.cache import AdapterNode, Insertion, UnifiedTree
from sglang_graft.pool.ledger import Owner


def put(
    tree: UnifiedTree, adapter: AdapterNode, tokens: "array[int]", *, start: int = 0, salt: str = ""
) -> Insertion:
    """Cache the KV of `tokens`, of which the caller holds the first `start`."""
    pages = tree.ledger.take(len(tokens) // 2 - start // 2, Owner.KV_RUNNING)
    assert pages is not None
    return tree.insert(adapter, tokens, pages, start=start, salt=salt)


def resident(tree: UnifiedTree, name: str, pages: int) -> AdapterNode:
    """An adapter on the device."""
    adapter = tree.add_adapter(name, pages)
    assert tree.load(adapter) is not None
    tree.loaded(adapter)
    return adapter


def checked(tree: UnifiedTree) -> None:
    """Every invariant of the tree and its ledger."""
    tree.check_invariants()
    tree.ledger.check_invariants()
