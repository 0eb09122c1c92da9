"""Which adapter a request names."""

import asyncio
from types import SimpleNamespace

import pytest
from fastapi import HTTPException

from sglang_graft.serving.names import (
    UnknownAdapterError,
    adapter_of_model,
    resolve_native,
    resolve_openai,
)

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


def resolve_for_generate(**request: object) -> list[object]:
    """What reached SGLang's own resolution."""
    reached: list[object] = []

    async def original(manager: object, obj: SimpleNamespace) -> None:
        reached.append(obj.lora_path)

    manager = SimpleNamespace(lora_ref_cache=LOADED, served_model_name="base-model")
    obj = SimpleNamespace(**{"batch_size": 1, "parallel_sample_num": 1, **request})
    asyncio.run(resolve_native(original, manager, obj))
    return reached


def test_known_names_go_on_to_sglang() -> None:
    for path in ("legal", None, "", ["legal", None]):
        batch = len(path) if isinstance(path, list) else 1
        assert resolve_for_generate(lora_path=path, batch_size=batch) == [path]
    twice = ["legal", None] * 2
    assert resolve_for_generate(lora_path=twice, batch_size=2, parallel_sample_num=2) == [twice]


def test_an_engine_gets_a_value_error_for_an_unknown_name() -> None:
    with pytest.raises(UnknownAdapterError, match="legal, x:y"):
        resolve_for_generate(lora_path="typo")


@pytest.mark.parametrize("names", [["legal"], ["legal", None, "x:y"]])
def test_a_list_of_another_length_is_refused_before_anything_runs(names: list[object]) -> None:
    with pytest.raises(ValueError, match=rf"one name for each of 2 samples, got {len(names)}"):
        resolve_for_generate(lora_path=names, batch_size=2)
