"""Do two sides give the same greedy tokens? Asked before anything is compared.

In bf16, on a random model, sequences part where two tokens lie within a few steps of bf16 of each
other; so a parting counts as a disagreement only above a tolerance, and each side is also compared
with itself, asked alone and all at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import httpx

from sglang_graft.bench.client import request_body
from sglang_graft.sim.workloads import FIRST_TOKEN, Workload

TOLERANCE = {"bfloat16": 0.25, "float32": 0.01}
"""Gap of the two best log-probabilities below which a parting is a tie, by dtype."""
_LENGTHS = (5, 64, 400)
_TOKENS = 16
_PER_RANK = 2

Row = dict[str, Any]


async def ask(
    client: httpx.AsyncClient, workload: Workload, vocabulary: int, base_only: bool
) -> dict[str, list[Row]]:
    """Answers of the base model and of adapters of every rank: one by one, and all at once."""
    requests = _requests(workload, vocabulary, base_only)
    alone = [await answer(client, *request) for request in requests]
    together = await asyncio.gather(*(answer(client, *request) for request in requests))
    return {"alone": alone, "at_once": list(together)}


def _requests(
    workload: Workload, vocabulary: int, base_only: bool
) -> list[tuple[str | None, list[int]]]:
    by_rank: dict[int, list[str]] = {}
    for adapter in workload.adapters:
        by_rank.setdefault(adapter.rank, []).append(adapter.name)
    few = [name for names in by_rank.values() for name in names[:_PER_RANK]]
    source = random.Random(f"gate {workload.name}")
    longest = max(r.prompt_tokens for r in workload.requests)
    prompts = [
        [source.randrange(FIRST_TOKEN, vocabulary) for _ in range(length)]
        for length in _LENGTHS
        if length <= longest
    ]
    return [(name, prompt) for name in (None, *([] if base_only else few)) for prompt in prompts]


async def answer(client: httpx.AsyncClient, name: str | None, prompt: list[int]) -> Row:
    """A few greedy tokens of an adapter (None: the base model), as `compare` takes them.

    Raises httpx.HTTPError when there is no answer.
    """
    body = request_body(prompt, name, _TOKENS) | {"return_logprob": True, "top_logprobs_num": 2}
    response = await client.post("/generate", json=body)
    response.raise_for_status()
    found = response.json()
    best = [[entry[0] for entry in step] for step in found["meta_info"]["output_top_logprobs"]]
    return {"name": name, "length": len(prompt), "ids": found["output_ids"], "best": best}


async def forced(
    client: httpx.AsyncClient, name: str | None, prompt: list[int], ids: list[int]
) -> list[tuple[float, float]]:
    """For each token of an answer, below the prompt and the tokens before it: its log-probability
    and the best one. A greedy answer of these weights has about the best everywhere.

    Raises httpx.HTTPError when there is no answer.
    """
    asked = {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": len(prompt) - 1}
    response = await client.post("/generate", json=request_body([*prompt, *ids], name, 1) | asked)
    response.raise_for_status()
    found = response.json()["meta_info"]
    own, best = (found[f"input_{what}_logprobs"][-len(ids) :] for what in ("token", "top"))
    assert [entry[1] for entry in own] == ids, f"asked about {ids}, got {own}"
    return [(mine[0], top[0][0]) for mine, top in zip(own, best, strict=True)]


def compare(left: Sequence[Row], right: Sequence[Row], dtype: str) -> dict[str, Any]:
    """How many answers agree, and how far `left`'s two best tokens lie apart where they part.

    Only requests that both sides have are compared. ValueError when there are none.
    """
    theirs = {(row["name"], row["length"]): row for row in right}
    both = [(row, theirs[key]) for row in left if (key := (row["name"], row["length"])) in theirs]
    if not both:
        raise ValueError("the two sides were asked nothing in common")
    gaps, differences = [], []
    for one, other in both:
        pairs = enumerate(zip(one["ids"], other["ids"], strict=True))
        step = next((step for step, (a, b) in pairs if a != b), None)
        if step is not None:
            gaps.append(one["best"][step][0] - one["best"][step][1])
        common = list(zip(one["best"], other["best"], strict=True))[:step]
        differences += [abs(a[0] - b[0]) for a, b in common]
    return {
        "answers": len(both),
        "equal": len(both) - len(gaps),
        "largest_gap_where_they_part": max(gaps, default=0.0),
        "mean_logprob_difference": sum(differences) / max(len(differences), 1),
        "tolerance": TOLERANCE[dtype],
        "agree": max(gaps, default=0.0) <= TOLERANCE[dtype],
    }
