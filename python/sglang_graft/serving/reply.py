"""Answers of /generate name the adapter that made them.

Target (0.5.17): AROUND `TokenizerManager._wait_one_response`, which yields what is known of one
request so far. Reason: SGLang's `meta_info` does not tell which adapter answered.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from sglang_graft.engine.hooks import Hook


async def name_adapter(
    original: Callable[..., Any], self: Any, obj: Any, request: Any = None
) -> AsyncIterator[Any]:
    """AROUND `_wait_one_response`: `meta_info.adapter`, None for the base model."""
    named = obj.lora_path
    adapter = (named[0] if isinstance(named, list) and named else named) or None
    async with aclosing(original(self, obj, request)) as answers:
        async for answer in answers:
            answer["meta_info"]["adapter"] = adapter
            yield answer


HOOKS = (
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_one_response",
        kind="around",
        function=name_adapter,
        parameters=("self", "obj", "request"),
        reason="answers name the adapter that made them",
    ),
)
