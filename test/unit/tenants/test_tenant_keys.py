"""Keys are random, kept as hashes, and found by comparing all."""

from sglang_graft.tenants import key_id, make_key, matches
from sglang_graft.tenants.keys import hash_of


def test_a_key_is_found_by_its_hash_only() -> None:
    pairs = [make_key() for _ in range(5)]
    hashes = [hashed for _, hashed in pairs]
    assert len(set(hashes)) == 5
    for key, hashed in pairs:
        assert len(key) > 40
        assert hash_of(key) == hashed
        assert matches(key, hashes) == hashed
        assert matches(hashed, hashes) is None, "the hash opens nothing"
        assert key not in hashed
        assert hashed == "sha256:" + hashed.removeprefix("sha256:")
        assert key_id(hashed) == hashed[7:15]
    for wrong in ("", "graft-", pairs[0][0][:-1], pairs[0][0] + "x", "\ud800"):
        assert matches(wrong, hashes) is None
