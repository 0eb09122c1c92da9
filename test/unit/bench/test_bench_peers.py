"""`--peer`: who is measured, with which flags."""

import pytest

from sglang_graft.bench.peers import parse_peers


def test_every_kind_of_peer() -> None:
    texts = ["stock:8,16", "base", "graft:cost,lru+no-prefetch,host-memory-gb=4+elora", "stock:8"]
    peers = parse_peers(texts)
    assert [(p.label, p.engine, p.slots, p.base_traffic) for p in peers] == [
        ("stock:8", "stock", 8, False),
        ("stock:16", "stock", 16, False),
        ("base", "base", 0, True),
        ("graft:cost", "graft", 0, False),
        ("graft:lru+no-prefetch", "graft", 0, False),
        ("graft:host-memory-gb=4+elora", "graft", 0, False),
    ]
    assert [p.flags for p in peers[3:]] == [
        ("--graft-policy", "cost"),
        ("--graft-policy", "lru", "--graft-no-prefetch"),
        ("--graft-host-memory-gb", "4", "--graft-policy", "elora"),
    ]


def test_a_server_with_adapters_may_be_asked_for_the_base_model_alone() -> None:
    stock, graft = parse_peers(["stock:8+base-traffic", "graft:base-traffic"])
    assert stock.base_traffic
    assert (stock.slots, stock.flags) == (8, ())
    assert graft.base_traffic
    assert graft.flags == ("--graft-policy", "cost")  # the default, by name


def test_the_protocols_name_of_an_ablation_is_an_option_of_the_server() -> None:
    (peer,) = parse_peers(["graft:no-host-tier"])
    assert peer.flags == ("--graft-policy", "cost", "--graft-no-host-kv")


def test_a_slug_is_a_part_of_a_file_name() -> None:
    slugs = [p.slug for p in parse_peers(["graft:cost,cost+no-prefetch,host-memory-gb=4", "base"])]
    assert len(set(slugs)) == len(slugs)
    assert all(set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_") for slug in slugs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stock", "wanted stock:SLOTS"),
        ("stock:0", "wanted stock:SLOTS"),
        ("stock:many", "wanted stock:SLOTS"),
        ("graft:fifo", "got 'fifo'"),
        ("graft:enable", "got 'enable'"),
        ("vllm", "wanted stock:SLOTS, base or graft"),
        ("base:8", "wanted stock:SLOTS, base or graft"),
    ],
)
def test_a_wrong_peer(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_peers([text])
    with pytest.raises(ValueError, match="at least one"):
        parse_peers([])
