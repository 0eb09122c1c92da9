"""Which adapter a request names."""

from types import SimpleNamespace

import pytest
from fastapi import HTTPException

from sglang_graft.serving.names import adapter_of_model, resolve_openai

LOADED = {"legal": 1, "x:y": 2}
BASE = {"base-model"}


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ("legal", "legal"),
        ("base-model:legal", "legal"),
        ("anything: legal ", "legal"),
        ("x:y", "x:y"),
        ("base-model:x:y", "x:y"),
        ("base-model", None),
        ("default", None),
        ("", None),
    ],
)
def test_names_that_are_known(model: str, adapter: str | None) -> None:
    assert adapter_of_model(model, LOADED, BASE) == adapter


@pytest.mark.parametrize("model", ["lega", "base-model:lega", "base-model:", "legal:v2", ":"])
def test_names_that_are_nobodys(model: str) -> None:
    with pytest.raises(KeyError):
        adapter_of_model(model, LOADED, BASE)


def resolve(model: str, explicit: object) -> object:
    arguments = SimpleNamespace(model_path="models/base")
    manager = SimpleNamespace(
        lora_ref_cache=LOADED, served_model_name="base-model", server_args=arguments
    )
    return resolve_openai(print, SimpleNamespace(tokenizer_manager=manager), model, explicit)


def test_the_model_field_wins_then_lora_path() -> None:
    assert resolve("legal", "x:y") == "legal"
    assert resolve("models/base", "x:y") == "x:y"
    assert resolve("base-model", ["legal", None]) == ["legal", None]
    assert resolve("base-model", None) is None


@pytest.mark.parametrize(("model", "explicit"), [("typo", None), ("base-model", ["legal", "typo"])])
def test_an_unknown_name_is_404_and_lists_the_loaded(model: str, explicit: object) -> None:
    with pytest.raises(HTTPException, match="legal, x:y") as error:
        resolve(model, explicit)
    assert error.value.status_code == 404
    assert "'typo'" in error.value.detail
