"""No client's text names a tenant, and no two tenants' salts meet."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_graft.tenants.carrier import decode, encode

NAMES = st.sampled_from(["a", "ab", "b", "p", "s", "a.b"])
SHORT = st.text(max_size=2)
FORGED = st.builds(encode, NAMES, SHORT, shared=st.booleans())
TEXT = st.one_of(SHORT, FORGED, FORGED.map(lambda text: decode(text)[2]))


@given(NAMES, TEXT, st.booleans())
def test_what_was_written_is_read(name: str, client: str, shared: bool) -> None:
    tenant, is_shared, _ = decode(encode(name, client, shared=shared))
    assert (tenant, is_shared) == (name, shared)
    assert decode(encode(None, client, shared=False)) == ("", False, client)


@given(NAMES, TEXT, NAMES, TEXT, st.booleans())
def test_own_salts_are_of_one_tenant_and_one_text(
    name: str, client: str, other: str, text: str, shared: bool
) -> None:
    mine = decode(encode(name, client, shared=False))[2]
    theirs = decode(encode(other, text, shared=shared))[2]
    if mine == theirs:
        assert (name, client, False) == (other, text, shared)
