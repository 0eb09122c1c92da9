"""Two sides agree when they part only where two tokens are equally likely."""

import asyncio
from typing import Any

import httpx
import pytest
from helpers_bench import FakeServer, serving

from sglang_graft.bench import gate
from sglang_graft.bench.units import Load

WORKLOAD = Load(name="chat", rate=4.0, seconds=4.0, adapters=8).workload()


def row(ids: list[int], best: list[list[float]], name: str | None = None) -> dict[str, Any]:
    return {"name": name, "length": 5, "ids": ids, "best": best}


BEST = [[-0.1, -3.0], [-0.5, -0.6], [-1.0, -1.1]]


def test_a_tie_is_no_disagreement() -> None:
    other = row([1, 9, 9], [[-0.2, -3.0], [-0.5, -0.6], [-9.0, -9.0]])
    found = gate.compare([row([1, 2, 3], BEST)], [other], "bfloat16")
    assert (found["answers"], found["equal"], found["agree"]) == (1, 0, True)
    assert found["largest_gap_where_they_part"] == pytest.approx(0.1)
    # Only the step before they part is compared.
    assert found["mean_logprob_difference"] == pytest.approx(0.1)
    assert not gate.compare([row([1, 2, 3], BEST)], [other], "float32")["agree"]


def test_a_clear_token_is_a_disagreement() -> None:
    found = gate.compare([row([1, 2, 3], BEST)], [row([5, 2, 3], BEST)], "bfloat16")
    assert found["largest_gap_where_they_part"] == pytest.approx(2.9)
    assert not found["agree"]


def test_only_what_both_were_asked_is_compared() -> None:
    left = [row([1, 2, 3], BEST), row([1, 2, 3], BEST, "a")]
    assert gate.compare(left, [row([1, 2, 3], BEST, "a")], "float32")["answers"] == 1
    with pytest.raises(ValueError, match="nothing in common"):
        gate.compare(left[:1], left[1:], "float32")


@pytest.mark.parametrize("base_only", [False, True])
def test_questions_go_to_every_rank(base_only: bool) -> None:
    async def ask(url: str) -> dict[str, list[gate.Row]]:
        async with httpx.AsyncClient(base_url=url) as client:
            return await gate.ask(client, WORKLOAD, 40_000, base_only)

    with serving(FakeServer()) as server:
        answers = asyncio.run(ask(server.url))
    names = {answer["name"] for answer in answers["alone"]}
    adapters = {"adapter-0", "adapter-1", "adapter-2", "adapter-3"}  # two of each rank
    assert names == ({None} if base_only else {None, *adapters})
    found = gate.compare(answers["alone"], answers["at_once"], "float32")
    assert found["agree"]
    assert found["equal"] == found["answers"] == 3 * len(names)
