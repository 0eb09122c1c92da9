"""Pages of running requests, by row and by share."""

import pytest

from sglang_graft.cache import Lru
from sglang_graft.cache.shares import Shares
from sglang_graft.engine.page_table import PageTable


def test_pages_count_for_the_share_of_their_request() -> None:
    shares = Shares(Lru())
    a, b = shares.get("a"), shares.get("b")
    table = PageTable()
    table.extend([4, 7], [[1, 2, 3], [4]], [a, b])
    table.extend([4], [[5]], [a])
    assert (table.get(4), a.running, b.running, table.pages()) == ([1, 2, 3, 5], 4, 1, 5)
    table.replace(4, [5])  # the others went to the tree
    assert (a.running, b.running) == (1, 1)
    table.check_invariants(shares)
    assert table.pop(4) == [5]
    assert table.pop(7) == [4]
    assert table.pop(9) == []
    assert (a.running, b.running) == (0, 0)
    table.extend([4], [[6]], [b])  # the row is another request's
    assert (a.running, b.running) == (0, 1)
    table.check_invariants(shares)
    b.running = 3
    with pytest.raises(AssertionError, match="share 'b' counts 3 running pages"):
        table.check_invariants(shares)
