"""An adapter's own chat template goes before the base model's.

Targets (0.5.17):
- AROUND `OpenAIServingChat._process_messages`, which every chat route calls: SGLang renders with
  the one template of the base model's tokenizer. The adapter's goes in as the `chat_template` that
  the tokenizer takes per call; it is compiled and rendered by transformers, in its sandbox.
- AROUND `AnthropicServing._convert_to_chat_completion_request`: whether system messages in the
  middle are merged depends on the template.
- `RequestTemplates` stands for SGLang's `TemplateManager`: what SGLang knows of a template (the
  shape of contents, how it thinks) is asked for again and again while an answer is made.

The template belongs to the registration that a name leads to, so it is replaced and goes with it
(`serving/registry`). Folders are read, and templates compiled, in threads.
"""

import asyncio
import copy
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.parser.jinja_template_utils import detect_jinja_template_content_format
from sglang.srt.parser.template_detection import (
    detect_inline_system_support,
    detect_reasoning_pattern,
)
from sglang.srt.parser.template_manager import TemplateManager
from transformers.utils.chat_template_utils import render_jinja_template

from sglang_graft.adapters import AdapterError
from sglang_graft.adapters.chat_template import DEFAULT, KEY, read_chat_template
from sglang_graft.engine.hooks import Hook
from sglang_graft.serving import bad_input

TOOL_USE = "tool_use"
"""The name of the template that transformers takes when a request has tools."""

_COMPILE_ERRORS = (jinja2.TemplateError, ArithmeticError, RecursionError, SyntaxError, MemoryError)


@dataclass(frozen=True)
class ChatTemplate:
    """One template, and what SGLang asks about templates."""

    text: str
    content_format: str
    force_reasoning: bool
    reasoning_config: Any
    inline_system: bool


Templates = dict[str, ChatTemplate]
"""The templates of one adapter by name, `default` among them."""


@dataclass
class Use:
    """The registration whose template a request is rendered with."""

    name: str
    lora_id: str
    templates: Templates | None
    template: ChatTemplate | None
    stale: bool = False
    """Set when the name led to another registration by the time the request was accepted."""


class StaleError(ValueError):
    """The adapter was replaced, template and all, between rendering and acceptance."""

    status_code = 503


# Set in the request's own task, so it lasts for its whole answer.
_use: ContextVar[Use | None] = ContextVar("chat_template", default=None)


def read(path: str | Path) -> Templates | None:
    """The templates of an adapter folder. Blocks. Raises AdapterError for one that is broken."""
    found = read_chat_template(Path(path))
    if found is None:
        return None
    file, texts = found
    return {name: _compiled(file, text) for name, text in texts.items() if text} or None


async def read_in_thread(path: str | Path) -> Templates | None:
    """`read`, out of the event loop's way."""
    return await asyncio.to_thread(read, path)


def _compiled(file: Path, text: str) -> ChatTemplate:
    try:
        render_jinja_template([], chat_template=text)  # no conversation: compiles only
    except _COMPILE_ERRORS as error:
        line = getattr(error, "lineno", None)
        where = "" if line is None else f" (line {line})"
        raise AdapterError(file, KEY, f"is no usable template: {error}{where}") from error
    force, config = detect_reasoning_pattern(text)
    return ChatTemplate(
        text=text,
        content_format=detect_jinja_template_content_format(text),
        force_reasoning=force,
        reasoning_config=config,
        inline_system=detect_inline_system_support(text),
    )


def use(manager: Any, adapter: str | None, *, tools: bool) -> Use | None:
    """From now on this request is rendered with the template of `adapter`, if it has one."""
    chosen = None
    if adapter is not None:
        ref = manager.lora_registry.ref(adapter)  # None: unloaded meanwhile
        lora_id = "" if ref is None else ref.lora_id
        templates = manager.lora_registry.templates.get(lora_id)
        chosen = Use(adapter, lora_id, templates, _pick(templates, tools))
    _use.set(chosen)
    return chosen


def _pick(templates: Templates | None, tools: bool) -> ChatTemplate | None:
    if templates is None:
        return None
    return (templates.get(TOOL_USE) if tools else None) or templates.get(DEFAULT)


def check_accepted(manager: Any, lora_id: str | list[str | None] | None) -> None:
    """A request has been accepted with `lora_id`: StaleError when that has another template."""
    used = _use.get()
    if used is None:
        return
    templates = manager.lora_registry.templates
    ids = lora_id if isinstance(lora_id, list) else [lora_id]
    for accepted in ids:
        if accepted is None or accepted == used.lora_id:
            continue
        if templates.get(accepted) != used.templates:
            used.stale = True
            raise StaleError(f"Adapter {used.name!r} was replaced meanwhile; try again")


def process_messages(
    original: Callable[..., Any], self: Any, request: Any, is_multimodal: bool
) -> Any:
    """AROUND `_process_messages`. ValueError when the template cannot render the messages."""
    used = _use.get()
    given = request.chat_template_kwargs or {}
    ours = used is not None and used.template is not None and KEY not in given
    if ours:
        assert used is not None
        assert used.template is not None
        request.chat_template_kwargs = given | {KEY: used.template.text}
    try:
        return bad_input.reading(original, self, request, is_multimodal)
    finally:
        if ours:
            # It may run again, for another registration.
            request.chat_template_kwargs = {
                key: value for key, value in request.chat_template_kwargs.items() if key != KEY
            } or None


def convert_messages(original: Callable[..., Any], self: Any, anthropic_request: Any) -> Any:
    """AROUND `AnthropicServing._convert_to_chat_completion_request`."""
    used = _use.get()
    if used is None or used.template is None:
        return original(self, anthropic_request)
    view = copy.copy(self)
    view._merge_inline_system = not used.template.inline_system
    return original(view, anthropic_request)


class RequestTemplates(TemplateManager):
    """SGLang's template manager; for a request whose adapter has a template, of that one."""

    def __init__(self, base: Any) -> None:
        self._base = base

    @property
    def chat_template_name(self) -> Any:
        """Of one of SGLang's built-in templates."""
        return self._base.chat_template_name if _current() is None else None

    @property
    def completion_template_name(self) -> Any:
        """Adapters bring none."""
        return self._base.completion_template_name

    @property
    def jinja_template_content_format(self) -> Any:
        """`string` or `openai`."""
        template = _current() or self._base
        return getattr(template, "content_format", None) or self._base.jinja_template_content_format

    @property
    def force_reasoning(self) -> Any:
        """Whether answers begin with a thought."""
        return (_current() or self._base).force_reasoning

    @property
    def reasoning_config(self) -> Any:
        """How a request switches thinking on and off."""
        return (_current() or self._base).reasoning_config

    @property
    def suggested_reasoning_parser(self) -> Any:
        """Of the server, which has one parser for all."""
        return self._base.suggested_reasoning_parser

    @property
    def suggested_tool_call_parser(self) -> Any:
        """Of the server, which has one parser for all."""
        return self._base.suggested_tool_call_parser


def _current() -> ChatTemplate | None:
    used = _use.get()
    return None if used is None else used.template


_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_ANTHROPIC = f"{AnthropicServing.__module__}.{AnthropicServing.__name__}"

HOOKS = (
    Hook(
        target=f"{_CHAT}._process_messages",
        kind="around",
        function=process_messages,
        parameters=("self", "request", "is_multimodal"),
        reason="an adapter's own chat template is used for its requests",
    ),
    Hook(
        target=f"{_ANTHROPIC}._convert_to_chat_completion_request",
        kind="around",
        function=convert_messages,
        parameters=("self", "anthropic_request"),
        reason="system messages fit the adapter's own chat template",
    ),
)
