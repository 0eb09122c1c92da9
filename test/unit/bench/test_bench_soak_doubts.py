"""A doubtful answer is judged by each of its tokens, below its own prefix."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from sglang_graft.bench import gate
from sglang_graft.bench.soak_doubts import MOST_KEPT, Doubts

TOLERANCE = gate.TOLERANCE["bfloat16"]


def row(ids: list[int], best: list[float]) -> gate.Row:
    return {"name": "a", "length": 5, "ids": ids, "best": [[p, p - 1.0] for p in best]}


RIGHT = [(-0.5, -0.5), (-0.6, -0.6)]


def judged(
    answer: gate.Row, forced: list[tuple[float, float]], first: list[tuple[float, float]] = RIGHT
) -> list[str]:
    doubts = Doubts("bfloat16")
    doubts.add("it", "folder", row([7, 8], [-0.5, -0.6]), answer)
    assert doubts.problems() == ["it; not judged yet"]

    async def force(origin: str, ids: list[int]) -> list[tuple[float, float]]:
        assert origin == "folder"
        return forced if ids == answer["ids"] else first

    asyncio.run(doubts.judge(force))
    return doubts.problems()


def test_near_ties_everywhere_are_the_same_weights() -> None:
    answer = row([7, 9], [-0.5, -0.8])
    assert judged(answer, [(-0.5, -0.5), (-0.6 - 1.9 * TOLERANCE, -0.6)]) == []


@pytest.mark.parametrize(
    ("forced", "what"),
    [
        ([(-0.5, -0.5), (-0.61 - 2 * TOLERANCE, -0.6)], "0.510 from the best"),
        ([(-0.5, -0.5), (-1.1, -1.1)], "0.300 from its own"),
    ],
)
def test_one_token_that_is_no_choice_of_theirs_is_a_problem(
    forced: list[tuple[float, float]], what: str
) -> None:
    (problem,) = judged(row([7, 9], [-0.5, -0.8]), forced)
    assert what in problem


def test_weights_that_became_others_do_not_call_their_own_answers_right() -> None:
    answer = row([7, 9], [-0.5, -0.8])
    (problem,) = judged(answer, [(-0.5, -0.5), (-0.8, -0.8)], first=[(-0.5, -0.5), (-2.0, -0.8)])
    assert "1.200 from the best" in problem


def test_what_is_judged_is_not_asked_again() -> None:
    doubts, asked = Doubts("float32"), []

    async def force(origin: str, ids: list[int]) -> list[tuple[float, float]]:
        asked.append(origin)
        return [(-0.5, -0.5)]

    for name in ("a", "b"):
        doubts.add("it", name, row([7], [-0.5]), row([7], [-0.5]))
        asyncio.run(doubts.judge(force))
    assert asked == ["a", "a", "b", "b"]  # the first answer, and the doubtful one


def test_beyond_what_is_kept_they_are_counted() -> None:
    doubts = Doubts("float32")
    for _ in range(MOST_KEPT + 2):
        doubts.add("it", "a", row([7], [-0.5]), row([7], [-0.5]))
    assert len(doubts.kept) == MOST_KEPT
    assert doubts.problems()[-1] == "2 more answers like these"


def test_tokens_are_asked_about_below_their_own_prefix() -> None:
    bodies: list[dict[str, Any]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        own = [[None, 2, None], [-0.1, 5, None], [-0.7, 6, None]]
        best = [None, [[-0.1, 5, None]], [[-0.4, 9, None]]]
        meta = {"input_token_logprobs": own, "input_top_logprobs": best}
        return httpx.Response(200, json={"output_ids": [1], "meta_info": meta})

    async def ask() -> list[tuple[float, float]]:
        transport = httpx.MockTransport(serve)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            return await gate.forced(client, "a", [1, 2], [5, 6])

    assert asyncio.run(ask()) == [(-0.1, -0.1), (-0.7, -0.4)]
    (body,) = bodies
    assert body["input_ids"] == [1, 2, 5, 6]
    assert body["logprob_start_len"] == 1
    assert body["lora_path"] == "a"
