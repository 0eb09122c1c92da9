"""What several fields of one request name together."""

import pytest

from sglang_graft.serving.choice import ConflictError, Named, agreed, names_of, only


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"model": None, "lora_path": "", "lora_name": None}, None),
        ({"model": "a"}, "a"),
        ({"lora_path": "a"}, "a"),
        ({"lora_name": "a"}, "a"),
        ({"model": "a", "lora_path": "a", "lora_name": "a"}, "a"),
        ({"lora_path": ["a", None, "b"]}, ["a", None, "b"]),
        ({"model": "a", "lora_path": ["a", "a"]}, ["a", "a"]),
        ({"lora_path": ["a", "b"], "lora_name": ""}, ["a", "b"]),
    ],
)
def test_fields_that_agree(fields: dict[str, Named], wanted: Named) -> None:
    assert agreed(**fields) == wanted


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "a", "lora_name": "b"},
        {"model": "a", "lora_path": "b"},
        {"lora_path": "a", "lora_name": "b"},
        {"model": "a", "lora_path": "a", "lora_name": "b"},
        {"model": "a", "lora_path": ["a", None]},
        {"lora_path": ["a", "b"], "lora_name": "a"},
        {"lora_path": ["a", "b"], "other": ["b", "a"]},
    ],
)
def test_fields_that_disagree_are_named(fields: dict[str, Named]) -> None:
    with pytest.raises(ConflictError) as error:
        agreed(**fields)
    assert error.value.status_code == 400
    first, *_, last = fields
    assert first in str(error.value)
    assert last in str(error.value)


def test_names_of_a_choice() -> None:
    assert names_of(["a", None, "b", "a", ""]) == ["a", "b"]
    assert names_of(None) == []
    assert only(["a", "a"]) == only("a") == "a"
    assert only(["a", None]) is only(None) is only([None]) is only([]) is None
