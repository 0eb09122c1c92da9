"""Reads and copies take turns, each on their own way."""

from sglang_graft.cache import Node, Rates
from sglang_graft.sim.links import Links

RATES = Rates(h2d_bytes_per_s=8, disk_bytes_per_s=2)


def test_copies_take_turns_and_wait_for_their_own_read() -> None:
    links = Links(RATES)
    one, two = (Node(serial, b"", [], b"") for serial in (1, 2))
    assert links.here_at([one, two]) == 0.0
    assert links.read(one, 8, now=10.0) == 4.0
    assert links.copy(two, 16, now=10.0) == 2.0
    assert links.here_at([two]) == 12.0
    assert links.copy(one, 8, now=10.0) == 1.0, "it is read until 14"
    assert links.here_at([one, two]) == 15.0
    links.copy(two, 8, now=11.0)
    assert links.here_at([two]) == 16.0, "in the order in which they were begun"


def test_one_request_after_the_other() -> None:
    links = Links(RATES)
    assert links.landed(1.0, 0.0, 0.0) == 1.0
    assert links.landed(1.0, 4.0, 2.0) == 7.0
    assert links.landed(1.0, 4.0, 2.0) == 11.0
    assert links.landed(1.0, 0.0, 2.0) == 13.0
    assert (links.disk_at, links.link_at) == (9.0, 13.0)
