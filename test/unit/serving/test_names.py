"""Which adapter a request names."""

import asyncio
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from sglang_graft.adapters.folder_names import given_problem
from sglang_graft.adapters.location import READ_FILES
from sglang_graft.serving import names
from sglang_graft.serving.choice import ConflictError
from sglang_graft.serving.names import (
    UnknownAdapterError,
    adapter_of_model,
    resolve_native,
    resolve_openai,
)
from sglang_graft.serving.on_demand import OnDemand

LOADED = {"legal": 1, "x:y": 2}
BASE = {"base-model"}


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ("legal", "legal"),
        ("base-model:legal", "legal"),
        ("base-model: legal ", "legal"),
        ("default:legal", "legal"),
        ("x:y", "x:y"),
        ("base-model:x:y", "x:y"),
        ("base-model", None),
        ("default", None),
        ("", None),
    ],
)
def test_names_that_are_known(model: str, adapter: str | None) -> None:
    assert adapter_of_model(model, LOADED, BASE) == adapter


@pytest.mark.parametrize(
    "model", ["lega", "base-model:lega", "base-model:", "legal:v2", ":", "anything:legal", "x"]
)
def test_names_that_are_nobodys(model: str) -> None:
    with pytest.raises(KeyError):
        adapter_of_model(model, LOADED, BASE)


def resolve(model: str, explicit: object) -> object:
    arguments = SimpleNamespace(model_path="models/base")
    manager = SimpleNamespace(
        lora_ref_cache=LOADED, served_model_name="base-model", server_args=arguments
    )
    return resolve_openai(print, SimpleNamespace(tokenizer_manager=manager), model, explicit)


def test_the_longest_base_name_is_taken_off() -> None:
    bases = {"gpt", "gpt:120b"}
    assert adapter_of_model("gpt:120b:legal", LOADED, bases) == "legal"
    assert adapter_of_model("gpt:legal", LOADED, bases) == "legal"


@pytest.mark.parametrize("name", ["base-model", "base-model:x", "default:x", ":x", "default", ""])
def test_names_that_requests_would_read_otherwise_are_refused(name: str) -> None:
    assert names.reserved(name, BASE) is not None
    assert given_problem(name, BASE) is not None


@pytest.mark.parametrize("name", ["x:y", "team/legal", "a/b:c", "base-model2:x"])
def test_other_names_with_colons_and_slashes_are_their_own(name: str) -> None:
    assert names.reserved(name, BASE) is None
    assert given_problem(name, BASE) is None
    assert adapter_of_model(name, {name}, BASE) == name
    assert adapter_of_model(f"base-model:{name}", {name}, BASE) == name


def test_model_and_lora_path_must_agree() -> None:
    assert resolve("legal", "legal") == "legal"
    assert resolve("legal", ["legal", "legal"]) == ["legal", "legal"]
    with pytest.raises(ConflictError, match="model names 'legal' and lora_path names 'x:y'"):
        resolve("legal", "x:y")
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


def with_folders(root: Path, refuse: str | None = None) -> Any:
    """A manager with a folder `fresh`, which loads unless `refuse` says why not."""
    for name in READ_FILES[:2]:
        (root / "fresh").mkdir(exist_ok=True)
        (root / "fresh" / name).write_text("x")
    manager = SimpleNamespace(
        lora_ref_cache=dict(LOADED),
        served_model_name="base-model",
        server_args=SimpleNamespace(model_path="models/base"),
    )

    class Store:
        def loaded(self, name: str) -> str | None:
            return str(manager.lora_ref_cache[name]) if name in manager.lora_ref_cache else None

        async def check(self, path: Path) -> str | None:
            return refuse

        async def load(self, name: str, path: Path) -> None:
            manager.lora_ref_cache[name] = 3

    manager._graft_on_demand = OnDemand(
        [root],
        0.01,
        Store(),  # type: ignore[arg-type]
        {"base-model", "models/base"},
    )
    return manager


def test_a_name_that_a_folder_might_have_is_looked_for_later(tmp_path: Path) -> None:
    owner = SimpleNamespace(tokenizer_manager=with_folders(tmp_path))
    for model, chosen in (("fresh", "fresh"), ("base-model:nobody", "nobody"), ("legal", "legal")):
        assert resolve_openai(print, owner, model, None) == chosen
    assert resolve_openai(print, owner, "base-model", ["fresh", None]) == ["fresh", None]
    for model, explicit in (("../x", None), ("base-model", "../x"), ("base-model", ["a b"])):
        with pytest.raises(HTTPException) as error:
            resolve_openai(print, owner, model, explicit)
        assert error.value.status_code == 404


def resolve_from_folders(manager: Any, name: str, *, stream: bool, openai: bool) -> list[str]:
    reached: list[str] = []

    async def original(manager: object, obj: SimpleNamespace) -> None:
        reached.append(obj.lora_path)

    async def request() -> None:
        if openai:
            resolve_openai(print, SimpleNamespace(tokenizer_manager=manager), name, None)
        obj = SimpleNamespace(lora_path=name, stream=stream)
        try:
            await resolve_native(original, manager, obj)
        finally:
            await manager._graft_on_demand.stop()

    asyncio.run(request())
    return reached


def test_a_folder_is_loaded_before_sglang_looks(tmp_path: Path) -> None:
    manager = with_folders(tmp_path)
    reached = resolve_from_folders(manager, "fresh", stream=False, openai=False)
    assert reached == ["fresh"]
    assert manager.lora_ref_cache["fresh"] == 3


@pytest.mark.parametrize(("name", "status"), [("fresh", 400), ("nobody", 404)])
@pytest.mark.parametrize(
    ("stream", "openai", "kind"),
    [
        (False, False, HTTPException),
        (False, True, HTTPException),
        (True, True, HTTPException),  # nothing has been sent yet
        (True, False, ValueError),  # becomes the last event of the stream
    ],
)
def test_refusals_reach_clients_with_their_status(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    status: int,
    stream: bool,
    openai: bool,
    kind: type[Exception],
) -> None:
    monkeypatch.setattr(names, "_over_http", [True])
    # In a server each request has a task, and so a context, of its own.
    monkeypatch.setattr(names, "_before_stream", ContextVar("test", default=False))
    manager = with_folders(tmp_path, refuse="it is damaged")
    with pytest.raises(kind) as caught:
        resolve_from_folders(manager, name, stream=stream, openai=openai)
    assert caught.value.status_code == status  # type: ignore[attr-defined]
    text = getattr(caught.value, "detail", str(caught.value))
    assert ("it is damaged" if name == "fresh" else "'nobody'") in text
