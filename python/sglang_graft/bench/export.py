"""Workloads as files that `sglang.bench_serving` replays (dataset `openai`, one request a line)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_graft.bench.play import token_ids
from sglang_graft.bench.shape import ModelShape
from sglang_graft.bench.units import Load
from sglang_graft.sim.workloads import Request, Segment, Workload

Decode = Callable[[list[int]], str]


def export(load: Load, model: Path, out: Path) -> str:
    """Write the requests of `load` below `out`; returns the command that replays them.

    ValueError when `model` has no tokenizer.
    """
    from transformers import AutoTokenizer

    shape = ModelShape.read(model, "cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model: wanted a folder with a tokenizer, got {model}: {error}"
        ) from None
    workload = load.workload()
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{load.name}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for line in lines(workload, tokenizer.decode, shape.vocabulary):
            file.write(json.dumps(line) + "\n")
    return command(path, workload)


def lines(workload: Workload, decode: Decode, vocabulary: int) -> list[dict[str, Any]]:
    """One body of /v1/chat/completions for each request, in order of arrival of the sessions.

    `lora_path` names the adapter of each; what bench_serving adds to a body leaves it as it is.
    """
    order = sorted(range(len(workload.requests)), key=lambda i: workload.requests[i].arrival_s)
    return [
        {
            "messages": messages(workload.requests[i], decode, vocabulary),
            "max_tokens": workload.requests[i].output.length,
            "lora_path": workload.adapters[workload.requests[i].adapter].name,
            "ignore_eos": True,
        }
        for i in order
    ]


def messages(request: Request, decode: Decode, vocabulary: int) -> list[dict[str, str]]:
    """The prompt as messages: what an adapter's users share is the system prompt."""
    segments = request.prompt
    has_system = len(segments) > 1 and not segments[0].generated and not segments[1].generated
    found = []
    for place, segment in enumerate(segments):
        role = "assistant" if segment.generated else "user"
        if place == 0 and has_system:
            role = "system"
        found.append({"role": role, "content": decode(_tokens(segment, vocabulary))})
    return found


def _tokens(segment: Segment, vocabulary: int) -> list[int]:
    return token_ids(segment, vocabulary)


def command(path: Path, workload: Workload) -> str:
    """The call of `sglang.bench_serving` with the mean rate of all requests."""
    requests = workload.requests
    seconds = max((r.arrival_s for r in requests), default=0.0)
    rate = len(requests) / seconds if seconds > 0 else len(requests)
    line: Sequence[str] = [
        *("python", "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"),
        *("--dataset-name", "openai", "--dataset-path", str(path)),
        *("--num-prompts", str(len(requests)), "--request-rate", f"{rate:.3f}"),
    ]
    return shlex.join(line)
