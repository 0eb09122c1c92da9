"""The file of `graft sync`: what it means, and errors with line and field."""

from pathlib import Path

import pytest

from sglang_graft.cli.sync_file import Prompt, SyncFileError, parse, read_file

FILE = Path("/etc/graft/adapters.yaml")
WHOLE = """
version: 1
adapters:
  legal-v2:
    path: legal/v2
    pinned: true
    ttl_seconds: 600
    priority: 2
    warm: device
    warmup:
      - Who may sign?
      - {text: "Why?", max_tokens: 3}
  team/sales:
aliases:
  legal: legal-v2
"""


TENANT = f"tenants:\n  a:\n    keys: [sha256:{'0' * 64}]\n"


def test_a_whole_file() -> None:
    desired = parse(WHOLE, FILE)
    legal = desired.adapters["legal-v2"]
    assert legal.path == "/etc/graft/legal/v2", "paths start at the file's folder"
    assert legal.settings() == {"pinned": True, "ttl_seconds": 600, "priority": 2}
    assert legal.warmup == [Prompt(text="Who may sign?"), Prompt(text="Why?", max_tokens=3)]
    assert desired.adapters["team/sales"].path is None
    assert desired.aliases == {"legal": "legal-v2"}


@pytest.mark.parametrize("text", ["", "# nothing", "adapters: {}"])
def test_an_empty_file_wants_nothing(text: str) -> None:
    assert parse(text, FILE).adapters == {}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("adapters:\n  a:\n    path: 5\n", 3, "adapters.a.path: Input should be a valid string"),
        ("adapters:\n  a:\n    pined: true\n", 3, "adapters.a.pined: Extra inputs"),
        ("adapters:\n  a:\n    priority: 99\n", 3, "adapters.a.priority"),
        ("adapters:\n  a:\n    ttl_seconds: 0\n", 3, "adapters.a.ttl_seconds"),
        ("adapters:\n  a:\n    ttl_seconds: .inf\n", 3, "adapters.a.ttl_seconds"),
        ("adapters:\n  a:\n    warm: moon\n", 3, "'device' or 'host'"),
        ("adapters:\n  a:\n    warmup:\n    - x\n    - {text: y, tokens: 1}\n", 5, "tokens"),
        ("adapters:\n- a\n", 1, "adapters: Input should be a valid dictionary"),
        ("version: 2\n", 1, "version"),
        ("adapters: {}\naliases:\n  x: [a]\n", 3, "aliases.x"),
        ("adapters:\n  x: {path: p}\naliases:\n  x: x\n", 4, "aliases.x: an adapter has"),
        ("aliases:\n  x: a\n  y: x\n", 3, "aliases.y: 'x' is an alias"),
        ("adapters:\n  a: {path: p}\n  a: {path: q}\n", 3, "the key 'a' is there twice"),
        ("adapters: [\n", 2, "expected the node content"),
        ("x: !!python/object:os.system {}\n", 1, "could not determine a constructor"),
        ("adapters: {}\ntenants:\n", 2, "tenants: Input should be a valid dictionary"),
        ("tenants:\n  a:\n    keys: []\n", 3, "tenant a: keys: Tuple should have at least 1"),
        ("tenants:\n  a b: {}\n", 2, "tenant a b: keys: Field required"),
        (TENANT + "    page_floor: 200%\n", 4, "tenant a: page_floor: wanted at most 100%"),
        (TENANT + "    tokens_per_second: .inf\n", 4, "tenant a: tokens_per_second"),
        (TENANT + "  a: {}\n", 4, "the key 'a' is there twice"),
    ],
)
def test_errors_name_line_and_field(text: str, line: int, words: str) -> None:
    with pytest.raises(SyncFileError) as error:
        parse(text, FILE)
    assert str(error.value).startswith(f"{FILE}, line {line}: ")
    assert words in str(error.value)


def test_all_errors_are_told_at_once() -> None:
    with pytest.raises(SyncFileError) as error:
        parse("adapters:\n  a: {priority: x}\n  b: {pinned: 7}\n", FILE)
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == [
        f"{FILE}, line 2",
        f"{FILE}, line 3",
    ]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SyncFileError, match="No such file"):
        read_file(tmp_path / "missing.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SyncFileError, match="binary"):
        read_file(tmp_path / "binary")


def test_tenants_are_those_of_a_tenants_file() -> None:
    wanted = parse(TENANT + "    page_floor: 25%\n    adapters: ['a/*']\n", FILE).tenants
    assert wanted == {
        "a": {"keys": [f"sha256:{'0' * 64}"], "page_floor": "25%", "adapters": ["a/*"]}
    }
    assert parse("tenants: {}", FILE).tenants == {}
    assert parse("adapters: {}", FILE).tenants is None


def test_a_key_in_the_place_of_its_hash_is_not_repeated() -> None:
    with pytest.raises(SyncFileError) as error:
        parse("tenants:\n  a:\n    keys: [graft-secret]\n", FILE)
    assert "entry 1: wanted sha256:" in str(error.value)
    assert "secret" not in str(error.value)
