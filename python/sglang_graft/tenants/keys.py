"""API keys: made here, kept as hashes.

A key is 256 random bits, so nobody finds it by trying, whatever the hash costs. That is why the
hash is one SHA-256 and not scrypt: a slow hash protects passwords that people choose, and would
cost every request tens of milliseconds of CPU here. The file takes no other kind of key.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable

PREFIX = "graft-"
HASH_PREFIX = "sha256:"
_BYTES = 32


def make_key() -> tuple[str, str]:
    """A new key, and its hash for the tenants file."""
    key = PREFIX + secrets.token_urlsafe(_BYTES)
    return key, hash_of(key)


def hash_of(key: str) -> str:
    """The hash of a key as the file has it."""
    digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
    return HASH_PREFIX + digest


def matches(key: str, hashes: Iterable[str]) -> str | None:
    """The one of `hashes` that belongs to `key`. Compares all of them, each in constant time."""
    wanted, found = hash_of(key), None
    for candidate in hashes:
        if hmac.compare_digest(wanted, candidate):
            found = candidate
    return found


def key_id(hashed: str) -> str:
    """How logs and reports call a key: the first 8 digits of its hash."""
    return hashed.removeprefix(HASH_PREFIX)[:8]
