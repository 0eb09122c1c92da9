"""Ask a server of the OpenAI protocol by streaming, and measure what its user would feel."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_graft.cli.demo_server import ServerError

TIMEOUT = httpx.Timeout(30.0, read=600.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One streamed answer. `adapter` is None for the base model; `ttft_ms` is to the first text."""

    adapter: str | None
    text: str
    ttft_ms: float
    cached_tokens: int


def ask(
    client: httpx.Client, *, base: str, adapter: str | None, question: str, max_tokens: int
) -> Answer:
    """Stream the greedy answer of `adapter`, or of the model named `base` if it is None.

    Raises ServerError with the server's own words if it refuses, fails midway or says nothing.
    """
    who = adapter or base
    body = {
        "model": who,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    first: float | None = None
    pieces: list[str] = []
    cached = 0
    with client.stream("POST", "/v1/chat/completions", json=body, timeout=TIMEOUT) as response:
        if response.status_code != httpx.codes.OK:
            text = response.read().decode(errors="replace")
            raise ServerError(f"{who}: HTTP {response.status_code}: {text}")
        for event in _events(response.iter_lines(), who):
            piece = _text(event)
            if piece and first is None:
                first = time.perf_counter()
            pieces.append(piece)
            cached = max(cached, _cached_tokens(event))
    if first is None:
        raise ServerError(f"{who}: wanted an answer, got no text")
    return Answer(
        adapter=adapter,
        text="".join(pieces),
        ttft_ms=round((first - began) * 1000, 1),
        cached_tokens=cached,
    )


def pool_state(client: httpx.Client) -> dict[str, Any]:
    """What `GET /graft/pool` says; ServerError where the server has no such route."""
    response = client.get("/graft/pool", timeout=TIMEOUT)
    if response.status_code != httpx.codes.OK:
        raise ServerError(f"GET /graft/pool: HTTP {response.status_code}: is Graft on?")
    state: dict[str, Any] = response.json()
    return state


def _events(lines: Iterable[str], who: str) -> Iterable[dict[str, Any]]:
    for line in lines:
        content = line.removeprefix("data:").strip()
        if not line.startswith("data:") or content == "[DONE]":
            continue
        event: dict[str, Any] = json.loads(content)
        if "error" in event:
            raise ServerError(f"{who}: {event['error']}")
        yield event


def _text(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def _cached_tokens(event: dict[str, Any]) -> int:
    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
