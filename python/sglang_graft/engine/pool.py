"""The pool of one scheduler process: arena, ledger, tree and host pool, as the hooks share them.

SGLang builds KV pool, allocator, adapters and tree cache in four places that do not know each
other; they meet here. One process holds one pool.
"""

from dataclasses import dataclass

from sglang_graft.cache import Prices, UnifiedTree
from sglang_graft.pool import Arena, PageLayout, PageLedger
from sglang_graft.tiers import HostPool


@dataclass(frozen=True, slots=True)
class Pool:
    """The parts that own the pages of one arena, and the pages behind it in host memory.

    prices: what the tree's policy and the tiers reckon with.
    """

    layout: PageLayout
    arena: Arena
    ledger: PageLedger
    tree: UnifiedTree
    host: HostPool
    prices: Prices

    def check_invariants(self) -> None:
        """Assert the invariants of ledger and tree together."""
        self.ledger.check_invariants()
        self.tree.check_invariants()


_current: list[Pool] = []


def set_pool(pool: Pool) -> None:
    """Make `pool` this process's pool; a second one would be a second owner of GPU memory."""
    assert not _current, "this process has a pool already"
    _current.append(pool)


def get_pool() -> Pool:
    """This process's pool; an assertion error before the KV pool hook has run."""
    assert _current, "no pool yet: SGLang has not built its KV pool through Graft's hook"
    return _current[0]
