"""SGLang's Ollama routes: repaired, and errors before the answer begins.

Targets (0.5.17), all of `OllamaServing`. Reasons:
- `_convert_options_to_sampling_params` hands on `seed`, which no sampling parameter is named;
- `_stream_chat_response` and `_stream_generate_response` begin to answer before the request is
  looked at, so that a wrong one breaks the connection in the middle.
`/api/chat` also hands on what the tokenizer of transformers 5 returns, a mapping with the token
ids in it; `bad_input.normalize` takes them out.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from sglang_graft.engine.hooks import Hook


def name_seed(result: Any, self: Any, options: Any = None) -> Any:
    """AFTER `_convert_options_to_sampling_params`."""
    if "seed" in result:
        result["sampling_seed"] = result.pop("seed")
    return result


async def first_chunk(original: Callable[..., Awaitable[Any]], *args: Any, **more: Any) -> Any:
    """AROUND the streams: nothing is sent before there is something to send."""
    response = await original(*args, **more)
    chunks = response.body_iterator
    first = await anext(chunks)

    async def all_chunks() -> AsyncIterator[Any]:
        yield first
        async for chunk in chunks:
            yield chunk

    response.body_iterator = all_chunks()
    return response


_OLLAMA = "sglang.srt.entrypoints.ollama.serving.OllamaServing"

HOOKS = (
    Hook(
        target=f"{_OLLAMA}._convert_options_to_sampling_params",
        kind="after",
        function=name_seed,
        parameters=("self", "options"),
        reason="a seed is accepted",
    ),
    *(
        Hook(
            target=f"{_OLLAMA}.{name}",
            kind="around",
            function=first_chunk,
            parameters=("self", "gen_request", "raw_request", "model_name"),
            reason="wrong requests are 400, streamed or not",
        )
        for name in ("_stream_chat_response", "_stream_generate_response")
    ),
)
