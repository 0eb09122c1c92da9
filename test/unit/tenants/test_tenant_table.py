"""Whose a key is, and which names a tenant may use."""

import pytest

from sglang_graft.tenants import Tenant, TenantTable, make_key


def table(*globs: str) -> TenantTable:
    return TenantTable({"acme": Tenant(keys=(make_key()[1],), adapters=globs)})


@pytest.mark.parametrize(
    ("glob", "name", "may"),
    [
        ("legal", "legal", True),
        ("legal", "legal2", False),
        ("legal", "Legal", False),
        ("legal/*", "legal/a", True),
        ("legal/*", "legal/a/b", False),
        ("legal/*", "legal", False),
        ("legal/**", "legal/a/b", True),
        ("*", "a", True),
        ("*", "a/b", False),
        ("**", "a/b", True),
        ("v?", "v1", True),
        ("v?", "v/", False),
        ("a.c", "abc", False),
        ("a|b", "a", False),
        ("[ab]", "a", False),
        ("***a", "xxa", True),
        ("*", "a\nb", True),
        ("*", "a" * 257, False),
        ("*" * 200 + "b", "a" * 256, False),
    ],
)
def test_globs(glob: str, name: str, may: bool) -> None:
    assert table(glob).may_use("acme", name) is may


def test_without_globs_nothing_is_allowed() -> None:
    assert not table().may_use("acme", "")
    assert not table("x").may_use("gone", "x")
    assert not table("x").may_use_base("acme")
    assert table("a", "b*").visible("acme", ["bb", "c", "a"]) == ["bb", "a"]


def test_two_keys_of_one_tenant() -> None:
    (first, one), (second, two), (other, three) = (make_key() for _ in range(3))
    made = TenantTable({"a": Tenant(keys=(one, two)), "b": Tenant(keys=(three,), base=True)})
    assert [made.owner(key) for key in (first, second, other, "x")] == ["a", "a", "b", None]
    assert made.may_use_base("b")
