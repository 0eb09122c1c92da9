"""One streamed request to `/generate`, with the time of every token."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from sglang_graft.bench.clock import Clock

_COUNT = re.compile(r'"completion_tokens":\s*(\d+)')
_DONE = "[DONE]"


@dataclass(slots=True)
class Answer:
    """What came back. `arrivals`: (clock time, tokens so far) of each event that brought tokens, as
    they come; the rest is known at the end. `error` is empty when all tokens came."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    error: str = ""


class Send(Protocol):
    """Sends a prompt (token ids) to an adapter (None: the base model) for `new_tokens` greedy
    tokens, and fills `answer`: whoever cancels it keeps the arrivals so far. A failed request is an
    answer with `error`, not an exception."""

    async def __call__(
        self, prompt: list[int], adapter: str | None, new_tokens: int, answer: Answer
    ) -> None: ...


@dataclass(slots=True)
class HttpClient:
    """SGLang's native route. Only the last event is parsed: those before it are counted."""

    client: httpx.AsyncClient
    clock: Clock

    async def __call__(
        self, prompt: list[int], adapter: str | None, new_tokens: int, answer: Answer
    ) -> None:
        """See Send."""
        try:
            body = request_body(prompt, adapter, new_tokens) | {"stream": True}
            async with self.client.stream("POST", "/generate", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    answer.error = f"status {response.status_code}: {text[:500]}"
                    return
                await self._read(response, answer)
        except httpx.HTTPError as error:
            answer.error = repr(error)
        if not answer.error and len(answer.tokens) != new_tokens:
            answer.error = f"wanted {new_tokens} tokens, got {len(answer.tokens)}"

    async def _read(self, response: httpx.Response, answer: Answer) -> None:
        last = ""
        seen = 0
        async for line in response.aiter_lines():
            text = line.removeprefix("data:").strip()
            if not text or text == _DONE:
                continue
            count = _COUNT.search(text)
            tokens = int(count.group(1)) if count else 0
            if tokens > seen:
                answer.arrivals.append((self.clock.now(), tokens))
                seen = tokens
            last = text
        if not last:
            answer.error = "the stream ended without an event"
            return
        event: dict[str, Any] = json.loads(last)
        if "error" in event:
            answer.error = json.dumps(event["error"])[:500]
            return
        answer.tokens = event["output_ids"]
        answer.cached = event["meta_info"]["cached_tokens"]


def request_body(prompt: list[int], adapter: str | None, new_tokens: int) -> dict[str, Any]:
    """The JSON of POST /generate: greedy, and never stopped early."""
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }
    if adapter is not None:
        body["lora_path"] = adapter
    return body
