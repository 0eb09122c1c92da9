"""Tiny trees: 2 tokens a page, pages counted from 1."""

from array import array
from collections.abc import Callable

import pytest

from sglang_graft.cache import Lru, UnifiedTree
from sglang_graft.pool.ledger import PageLedger


@pytest.fixture
def make_tree() -> Callable[[int], UnifiedTree]:
    def make(pages: int, reserve: int = 0) -> UnifiedTree:
        return UnifiedTree(PageLedger(pages + 1, reserve=reserve), page_tokens=2, policy=Lru())

    return make


@pytest.fixture
def run() -> Callable[[str], "array[int]"]:
    """Tokens of a run written as letters: "ab" is page (a, a) then page (b, b)."""

    def tokens(text: str) -> "array[int]":
        return array("q", [ord(letter) for letter in text for _ in range(2)])

    return tokens
