"""Aliases: one step, no shadows, and a request keeps the adapter that it began with."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from manager import Manager
from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

from sglang_graft.serving import aliases, names
from sglang_graft.serving.aliases import Aliases
from sglang_graft.serving.unload import unload


def test_a_change_is_made_in_one_step() -> None:
    made = Aliases()
    made.change({"line": "a", "more": "b"})
    assert made.resolve("line") == "a"
    assert made.resolve(["line", None, "a", "nobody"]) == ["a", None, "a", "nobody"]
    assert made.resolve(None) is None
    before = made.table
    made.change({"line": "b", "more": None})
    assert before == {"line": "a", "more": "b"}, "who looks at the old table sees all of it"
    assert made.table == {"line": "b"}
    assert (made.of("b"), made.of("a")) == (["line"], [])
    made.check_invariants()


def change(manager: Manager, **changes: str | None) -> str | None:
    return asyncio.run(aliases.change(manager, changes))


def test_an_alias_shadows_nothing_and_leads_somewhere() -> None:
    manager = Manager()
    assert change(manager, line="legal") is None
    table = aliases.aliases(manager).table
    for changes, word in (
        ({"legal": "legal"}, "adapter of that name"),
        ({"base": "legal"}, "base model"),
        ({"default": "legal"}, "base model"),
        ({" x": "legal"}, "spaces"),
        ({"x": "nobody"}, "no adapter"),
        ({"x": "line"}, "is an alias"),
        ({"x": "legal", "y": "x"}, "is an alias"),
        ({"x": "legal", "y": "nobody"}, "no adapter"),
        ({"nobody": None}, "there is none"),
    ):
        assert word in (change(manager, **changes) or ""), changes
        assert aliases.aliases(manager).table is table, "all of it, or nothing"
    assert change(manager, line=None) is None
    assert aliases.aliases(manager).table == {}


def test_a_name_that_is_an_alias_cannot_be_loaded() -> None:
    manager = Manager()
    assert change(manager, line="legal") is None
    answer = asyncio.run(manager.load("line", "p1"))
    assert not answer.success
    assert "alias of 'legal'" in answer.error_message


def test_a_client_cannot_unload_what_an_alias_leads_to() -> None:
    manager = Manager()
    assert change(manager, line="legal") is None

    def ask(request: object) -> Any:
        obj = UnloadLoRAAdapterReqInput(lora_name="legal")
        return asyncio.run(unload(Manager.original_load, manager, obj, request))

    answer = ask(SimpleNamespace())
    assert not answer.success
    assert "'line' leads to it" in answer.error_message
    assert manager.retired == []
    assert ask(None).success, "Graft itself may"
    assert manager.retired == ["v1"]


@pytest.mark.parametrize("model", ["line", "base:line"])
def test_requests_reach_the_adapter_through_an_alias(model: str) -> None:
    manager = Manager()
    assert change(manager, line="legal") is None
    chosen = names.resolve_openai(print, SimpleNamespace(tokenizer_manager=manager), model, None)
    assert chosen == "line", "it is looked up only when the request takes the adapter's id"
    reached: list[Any] = []

    async def original(self: Any, obj: Any) -> None:
        reached.append(obj.lora_path)

    for given, wanted in ((chosen, "legal"), (["line", None], ["legal", None])):
        obj = SimpleNamespace(lora_path=given, batch_size=1 + (given != chosen))
        asyncio.run(names.resolve_native(original, manager, obj))
        assert reached.pop() == wanted


def test_a_folder_below_a_root_is_no_alias_but_may_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager()

    class Folders:
        async def exists(self, name: str) -> bool:
            return name == "team/legal"

    monkeypatch.setattr(aliases, "on_demand", lambda manager: Folders())
    assert "a folder below" in (change(manager, **{"team/legal": "legal"}) or "")
    assert change(manager, line="team/legal") is None
