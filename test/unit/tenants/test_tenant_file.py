"""The tenants file: what it may say, and errors that name file, tenant and field."""

import json
from pathlib import Path

import pytest

from sglang_graft.tenants import TenantsError, make_key, parse, read

# Fixed: they are part of the tests' names, which have to be the same in every process.
HASH = "sha256:" + "0a" * 32
OTHER = "sha256:" + "0b" * 32


def one(text: str) -> str:
    return "tenants: {acme: {keys: [" + HASH + "]" + (", " + text if text else "") + "}}"


def test_what_is_left_out_is_denied_or_unlimited() -> None:
    tenant = parse(one(""), "f")["acme"]
    assert (tenant.adapters, tenant.base, tenant.share_kv) == ((), False, False)
    assert (tenant.requests_per_second, tenant.tokens_per_second) == (None, None)
    assert (tenant.page_floor, tenant.page_cap, tenant.priority) == (0, None, 0)


def test_everything_as_yaml_and_as_json() -> None:
    fields = {
        "keys": [HASH, OTHER],
        "adapters": ["legal/*", "x"],
        "base": True,
        "priority": -3,
        "requests_per_second": 2,
        "tokens_per_second": 100.5,
        "burst_seconds": 3,
        "page_floor": "12.5%",
        "page_cap": 300,
    }
    as_json = parse(json.dumps({"tenants": {"a.b-c_1": fields}}), "f")
    lines = [f"    {name}: {json.dumps(value)}" for name, value in fields.items()]
    as_yaml = parse("\n".join(["tenants:", "  a.b-c_1:", *lines]), "f")
    assert as_json == as_yaml
    tenant = as_json["a.b-c_1"]
    assert (tenant.page_floor, tenant.page_cap, tenant.requests_per_second) == (0.125, 300, 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (one("page_floor: 1.5"), "tenant acme: page_floor: wanted whole pages"),
        (one("page_floor: 120%"), "tenant acme: page_floor: wanted at most 100%"),
        (one("page_floor: lots"), "tenant acme: page_floor: wanted a number of pages"),
        (one("page_cap: -1"), "tenant acme: page_cap: wanted 0 pages or more"),
        (one("page_floor: true"), "tenant acme: page_floor: "),
        (one("page_floor: 9, page_cap: 8"), "page_floor 9 is above page_cap 8"),
        (one("page_floor: 9, share_kv: true"), "page_floor and share_kv exclude each other"),
        (one("requests_per_second: 0"), "tenant acme: requests_per_second: "),
        (one("tokens_per_second: many"), "tenant acme: tokens_per_second: "),
        (one("tokens_per_second: .inf"), "tokens_per_second: Input should be a finite number"),
        (one(f"burst_seconds: 1{'0' * 400}"), "burst_seconds: wanted a smaller number"),
        (one("base: 'yes'"), "tenant acme: base: "),
        (one("adapters: legal"), "tenant acme: adapters: "),
        (one("adapters: ['']"), "tenant acme: adapters: wanted names or globs"),
        (one("limit: 3"), "tenant acme: limit: "),
        ("tenants: {acme: {keys: [plain]}}", "tenant acme: keys: entry 1: wanted sha256:"),
        ("tenants: {acme: {keys: []}}", "tenant acme: keys: "),
        ("tenants: {acme: {}}", "tenant acme: keys: "),
        ("tenants: {acme: 3}", "tenant acme: "),
        (f"tenants: {{a: {{keys: [{HASH}]}}, b: {{keys: [{HASH}]}}}}", "tenant b: keys: one key"),
        (f"tenants: {{a: {{keys: [{HASH}]}}, a: {{keys: [{OTHER}]}}}}", "line 1: 'a' is there"),
        (f"tenants: {{'a b': {{keys: [{HASH}]}}}}", "tenant 'a b': wanted a name"),
        (f"tenants: {{a: &x {{keys: [{HASH}]}}, b: *x}}", "YAML aliases"),
        ("tenants: [", "not YAML or JSON: line 1"),
        ("", "wanted an entry `tenants:`"),
        ("- a", "wanted an entry `tenants:`"),
        ("tenant: {}", "tenants: "),
        ("tenants: !!python/object:os.system {}", "not YAML or JSON"),
        ("[" * 5000, "not YAML or JSON"),
    ],
)
def test_an_error_names_file_tenant_and_field(text: str, message: str) -> None:
    with pytest.raises(TenantsError) as error:
        parse(text, "tenants.yaml")
    assert str(error.value).startswith("tenants.yaml: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_error_never_shows_what_stands_in_place_of_a_hash() -> None:
    key, _ = make_key()
    for text in (f"tenants: {{a: {{keys: [{key}]}}}}", f"tenants: {{a: {{keys: {key}}}}}"):
        with pytest.raises(TenantsError) as error:
            parse(text, "f")
        assert key not in str(error.value)


def test_the_example_of_the_documentation() -> None:
    page = Path(__file__).resolve().parents[3] / "docs/tenants.md"
    text = page.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    tenants = parse(text, "docs/tenants.md")
    assert list(tenants) == ["legal-team", "batch-jobs"]
    assert tenants["legal-team"].page_floor == 0.25


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TenantsError, match=r"none\.yaml: No such file"):
        read(tmp_path / "none.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(TenantsError, match="not UTF-8"):
        read(tmp_path / "binary")
    (tmp_path / "large").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(TenantsError, match="at most 1048576 bytes"):
        read(tmp_path / "large")
    (tmp_path / "good").write_text(one(""))
    assert list(read(tmp_path / "good")) == ["acme"]
