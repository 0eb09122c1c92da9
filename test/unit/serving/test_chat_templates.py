"""An adapter's own chat template: prepared at load, used for its requests, gone with it."""

import asyncio
import contextvars
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from manager import Manager
from sglang.srt.parser.template_manager import TemplateManager

from sglang_graft.adapters import AdapterError
from sglang_graft.adapters.chat_template import TEMPLATE_NAME
from sglang_graft.serving import chat_templates
from sglang_graft.serving.chat_templates import (
    RequestTemplates,
    StaleError,
    check_accepted,
    convert_messages,
    process_messages,
    read,
)

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
PARTS = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"


def folder(path: Path, text: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / TEMPLATE_NAME).write_text(text)
    return path


def in_request(function: Callable[[], Any]) -> Any:
    """What a function returns in a request of its own."""
    return contextvars.copy_context().run(function)


async def loaded(manager: Manager, name: str, path: Path, *, inplace: bool = False) -> Any:
    return await manager.load(name, str(path), inplace=inplace)


def test_a_template_is_prepared(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    assert read(folder(tmp_path, "")) is None
    for text, shape in ((PLAIN, "string"), (PARTS, "openai")):
        found = read(folder(tmp_path, text))
        assert found is not None
        assert (found["default"].text, found["default"].content_format) == (text, shape)
        assert found["default"].inline_system == (text == PLAIN)


@pytest.mark.parametrize(
    "text",
    [
        "{% for %}",
        "{{ x | nonsense }}",
        "{% for m in messages %}" * 40 + "{% endfor %}" * 40,
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{% generation %}",
    ],
)
def test_a_template_that_cannot_be_compiled_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(AdapterError, match="chat_template: is no usable template"):
        read(folder(tmp_path, text))


def test_tags_of_transformers_are_known(tmp_path: Path) -> None:
    text = "{% for m in messages %}{% generation %}x{% endgeneration %}{% break %}{% endfor %}"
    assert read(folder(tmp_path, text)) is not None


def test_a_broken_template_refuses_the_load_and_keeps_the_old_adapter(tmp_path: Path) -> None:
    async def scenario() -> None:
        manager = Manager()
        broken = folder(tmp_path / "broken", "{% for %}")
        for name in ("new", "legal"):
            answer = await loaded(manager, name, broken, inplace=True)
            assert not answer.success
            assert "chat_template" in answer.error_message
        assert list(manager.paths.values()) == ["v1"]
        assert manager.lora_registry.next_templates == {}

    asyncio.run(scenario())


def test_templates_follow_their_registrations(tmp_path: Path) -> None:
    async def scenario() -> None:
        manager = Manager()
        templates = manager.lora_registry.templates
        with_one, without = folder(tmp_path / "one", PLAIN), tmp_path
        assert (await loaded(manager, "new", with_one)).success
        (found,) = templates.values()
        assert found["default"].text == PLAIN
        (with_one / TEMPLATE_NAME).write_text(PARTS)
        assert (await loaded(manager, "new", with_one, inplace=True)).success
        assert [t["default"].text for t in templates.values()] == [PARTS]
        assert (await loaded(manager, "new", without, inplace=True)).success
        assert templates == {}
        assert (await loaded(manager, "new", with_one, inplace=True)).success
        await manager.unload("new")
        assert templates == {}

    asyncio.run(scenario())


@pytest.fixture
def manager(tmp_path: Path) -> Manager:
    """With `legal`, which has none, and `chatty`, which has two."""
    made = Manager()
    asyncio.run(loaded(made, "chatty", folder(tmp_path, PARTS)))
    (templates,) = made.lora_registry.templates.values()
    templates["tool_use"] = read(folder(tmp_path, THINKS))["default"]  # type: ignore[index]
    return made


def rendered_with(kwargs: dict[str, Any] | None = None) -> Any:
    """What SGLang's own code sees as the request's template; and what stays of it."""
    request = SimpleNamespace(chat_template_kwargs=kwargs)
    seen: list[Any] = []

    def original(_: Any, request: Any, __: bool) -> None:
        seen.append((request.chat_template_kwargs or {}).get("chat_template"))

    process_messages(original, None, request, False)
    return seen[0], request.chat_template_kwargs


def test_a_request_gets_the_template_of_its_adapter(manager: Manager) -> None:
    def request(name: str | None, *, tools: bool = False, **kwargs: Any) -> Any:
        def run() -> Any:
            chat_templates.use(manager, name, tools=tools)
            return rendered_with(kwargs or None)

        return in_request(run)

    assert request("legal") == (None, None)
    assert request(None) == (None, None)
    assert request("chatty") == (PARTS, None)
    assert request("chatty", tools=True) == (THINKS, None)
    assert request("chatty", thinking=True) == (PARTS, {"thinking": True})
    assert request("chatty", chat_template="own") == ("own", {"chat_template": "own"})
    assert rendered_with() == (None, None)


def test_sglang_is_told_about_that_template(manager: Manager) -> None:
    base = TemplateManager()
    base._chat_template_name = "chatml"
    ours = RequestTemplates(base)
    public = [
        name for name in vars(TemplateManager) if isinstance(vars(TemplateManager)[name], property)
    ]
    assert {name for name in public if name not in vars(RequestTemplates)} == set()

    def told(name: str | None, *, tools: bool = False) -> Any:
        def run() -> Any:
            chat_templates.use(manager, name, tools=tools)
            return ours.chat_template_name, ours.jinja_template_content_format, ours.force_reasoning

        return in_request(run)

    assert told(None) == told("legal") == ("chatml", "openai", False)
    assert told("chatty") == (None, "openai", False)
    assert told("chatty", tools=True)[:2] == (None, "string")
    assert ours.completion_template_name is base.completion_template_name is None
    assert ours.reasoning_config == base.reasoning_config
    assert ours.suggested_tool_call_parser is ours.suggested_reasoning_parser is None


def test_a_request_of_a_replaced_template_is_stale(manager: Manager, tmp_path: Path) -> None:
    ref = manager.lora_registry.ref("chatty")
    assert ref is not None

    def run() -> None:
        used = chat_templates.use(manager, "chatty", tools=False)
        assert used is not None
        for fine in (None, ref.lora_id, [ref.lora_id, None]):
            check_accepted(manager, fine)
        asyncio.run(loaded(manager, "chatty", folder(tmp_path, PLAIN), inplace=True))
        new = manager.lora_registry.ref("chatty")
        assert new is not None
        for accepted in (new.lora_id, [new.lora_id]):
            with pytest.raises(StaleError, match="'chatty' was replaced"):
                check_accepted(manager, accepted)
        assert used.stale

    in_request(run)
    check_accepted(manager, "whoever")  # a request that renders nothing


def test_a_template_that_stays_the_same_is_not_stale(tmp_path: Path) -> None:
    manager, path = Manager(), folder(tmp_path, PLAIN)

    def run() -> None:
        asyncio.run(loaded(manager, "chatty", path))
        used = chat_templates.use(manager, "chatty", tools=False)
        asyncio.run(loaded(manager, "chatty", path, inplace=True))
        new = manager.lora_registry.ref("chatty")
        assert used is not None
        assert new is not None
        assert new.lora_id != used.lora_id
        check_accepted(manager, new.lora_id)

    in_request(run)


def test_what_a_template_runs_into_is_an_error_of_the_request() -> None:
    def original(*_: Any) -> None:
        raise ZeroDivisionError("by zero")

    request = SimpleNamespace(chat_template_kwargs=None)
    with pytest.raises(ValueError, match="ZeroDivisionError: by zero"):
        process_messages(original, None, request, False)


def test_system_messages_are_merged_as_the_template_needs_it(manager: Manager) -> None:
    serving = SimpleNamespace(_merge_inline_system=False)

    def converted(name: str | None) -> bool:
        def run() -> bool:
            chat_templates.use(manager, name, tools=False)
            merged: bool = convert_messages(lambda s, _: s._merge_inline_system, serving, None)
            return merged

        return bool(in_request(run))

    assert not converted(None)
    assert not converted("legal")
    assert converted("chatty")
    assert serving._merge_inline_system is False
