"""Runs of tokens as bytes, and the tree surgery that needs nothing but nodes.

Tokens are compared as the bytes of their int64 values: one memcmp a node instead of a Python loop
over tokens, and the bytes of a page are the dictionary key of a child.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from sglang_graft.cache.node import HostCopy, Node

TOKEN_BYTES = 8


def token_bytes(tokens: array[int]) -> bytes:
    """The tokens as bytes; ValueError unless their type code is "q" (one copy, no loop)."""
    if tokens.itemsize != TOKEN_BYTES:
        raise ValueError(f"tokens: wanted array('q') of int64, got array({tokens.typecode!r})")
    return tokens.tobytes()


def salted(page: bytes, salt: str) -> bytes:
    """The edge of a first page below an adapter. Pages are of one length, so salts never mix.

    A salt is a client's own string: lone surrogates, which JSON can carry, must not raise here.
    """
    return page + salt.encode(errors="surrogatepass") if salt else page


def shared_bytes(key: bytes, data: bytes, offset: int, end: int, page_bytes: int) -> int:
    """How many leading bytes of `key` stand in `data[offset:end]`, in whole pages.

    The caller knows that the first page is equal, and that `end - offset` is whole pages. Halving
    compares each byte of `key` about once.
    """
    equal, most = 1, min(len(key), end - offset) // page_bytes
    while equal < most:
        middle = (equal + most + 1) // 2
        low = equal * page_bytes
        if data.startswith(key[low : middle * page_bytes], offset + low):
            equal = middle
        else:
            most = middle - 1
    return equal * page_bytes


def covering(node: Node, end: int, position: int) -> Node:
    """The KV node on the path to `node` that holds byte `position - 1` of the path.

    `end` is where `node` ends; 0 < position <= end.
    """
    while end - len(node.key) >= position:
        end -= len(node.key)
        assert node.parent is not None, f"byte {position} is above node {node.serial}"
        node = node.parent
    return node


def split(lower: Node, serial: int, size: int, page_bytes: int) -> Node:
    """Put the first `size` bytes of `lower` into a new node above it, and return that one.

    The old object stays the lower part, so that holders of its lock still unlock the whole path.
    Every lock on it passes through the new node: both carry the same count.
    """
    parent = lower.parent
    assert parent is not None, f"node {lower.serial} has no parent to split under"
    pages = size // page_bytes
    upper = Node(serial, lower.key[:size], lower.pages[:pages], lower.edge)
    upper.parent = parent
    upper.adapter = lower.adapter
    upper.share = lower.share
    upper.lock = lower.lock
    upper.hits = lower.hits
    upper.last_forward = lower.last_forward
    upper.last_use = lower.last_use
    upper.start = lower.start
    upper.whole = False
    upper.uses = lower.uses
    upper.used_at = lower.used_at
    lower.start += pages
    upper.left = lower.left
    upper.device_children = 1 if lower.pages else 0
    if lower.host is not None:
        upper.host = HostCopy(lower.host.pages[:pages])
        lower.host.pages = lower.host.pages[pages:]
    parent.children[lower.edge] = upper
    lower.key = lower.key[size:]
    lower.pages = lower.pages[pages:]
    lower.edge = lower.key[:page_bytes]
    lower.parent = upper
    upper.children[lower.edge] = lower
    return upper


def detach(node: Node) -> Node:
    """Take a KV node off its parent, which is returned. A detached node cannot be locked."""
    parent = node.parent
    assert parent is not None, f"node {node.serial} was already detached"
    del parent.children[node.edge]
    if node.pages:
        parent.device_children -= 1
    node.parent = None
    node.pages = []
    return parent


def below(node: Node) -> Iterator[Node]:
    """Every node under `node`, parents before their children. Finished nodes may be detached."""
    stack = list(node.children.values())
    while stack:
        found = stack.pop()
        stack.extend(found.children.values())
        yield found
