"""Answers name their adapter; streams end as before; Ollama's streams begin late enough."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_graft.serving.ollama import first_chunk, name_seed
from sglang_graft.serving.reply import name_adapter


@pytest.mark.parametrize(
    ("path", "wanted"), [("a", "a"), (["a"], "a"), (None, None), ("", None), ([], None)]
)
def test_every_answer_names_the_adapter(path: Any, wanted: str | None) -> None:
    closed = []

    async def original(*_: Any) -> AsyncIterator[dict[str, Any]]:
        try:
            while True:
                yield {"meta_info": {}}
        finally:
            closed.append(True)

    async def scenario() -> None:
        answers = name_adapter(original, None, SimpleNamespace(lora_path=path))
        for _ in range(2):
            answer = await anext(answers)
            assert answer["meta_info"] == {"adapter": wanted}
        await answers.aclose()  # type: ignore[attr-defined]
        assert closed == [True]

    asyncio.run(scenario())


def test_a_stream_that_cannot_begin_fails_before_it_is_sent() -> None:
    async def chunks(error: bool) -> AsyncIterator[bytes]:
        if error:
            raise ValueError("wrong")
        yield b"1"
        yield b"2"

    async def original(error: bool) -> Any:
        return SimpleNamespace(body_iterator=chunks(error))

    async def scenario() -> None:
        response = await first_chunk(original, False)
        assert [chunk async for chunk in response.body_iterator] == [b"1", b"2"]
        with pytest.raises(ValueError, match="wrong"):
            await first_chunk(original, True)

    asyncio.run(scenario())


def test_a_seed_has_its_name() -> None:
    assert name_seed({"seed": 3, "top_k": 1}, None) == {"sampling_seed": 3, "top_k": 1}
    assert name_seed({}, None) == {}
