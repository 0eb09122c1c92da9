"""Runs of tokens as bytes."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_graft.cache import Node
from sglang_graft.cache.runs import covering, shared_bytes

RUNS = st.lists(st.integers(0, 1), max_size=9)


@given(first=RUNS, second=RUNS, offset=st.integers(0, 3))
def test_shared_bytes_is_the_longest_common_prefix_in_pages(first, second, offset):
    page = 4
    key = b"".join(bytes([n] * page) for n in [0, *first])
    data = b"z" * offset * page + b"".join(bytes([n] * page) for n in [0, *second])
    expected = 1
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        expected += 1
    assert shared_bytes(key, data, offset * page, len(data), page) == expected * page


def test_covering_finds_the_node_of_a_byte():
    upper, lower = Node(1, b"aaaa", [1], b""), Node(2, b"bbbbcccc", [2, 3], b"")
    lower.parent = upper
    found = [covering(lower, 12, position) for position in (1, 4, 5, 12)]
    assert found == [upper, upper, lower, lower]
