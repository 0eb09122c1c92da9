"""A history of traffic becomes a workload, or says what is wrong with it."""

import json

import pytest

from sglang_graft.sim.history import workload_of

FIRST = {"start_s": 5, "adapter": "a", "rank": 8, "prompt_tokens": 40, "output_tokens": 4}


def made(*rows: object) -> list[str]:
    return [json.dumps(row) for row in rows]


def test_intervals_and_single_requests() -> None:
    interval = {"start_s": 10, "seconds": 60, "adapter": "b", "rank": 16, "requests": 5}
    interval |= {"prompt_tokens": 30, "output_tokens": 2, "shared_tokens": 10}
    again = {"start_s": 1, "adapter": "a", "prompt_tokens": 7, "output_tokens": 1}
    workload = workload_of(["", *made(FIRST, interval, again)])
    assert [(a.name, a.rank) for a in workload.adapters] == [("a", 8), ("b", 16)]
    times = [r.arrival_s for r in workload.requests]
    assert times == sorted(times)
    assert times[:2] == [1.0, 5.0]
    assert all(10 <= at < 70 for at in times[2:])
    assert [r.prompt_tokens for r in workload.requests] == [7, 40, *[30] * 5]
    shared = {r.prompt[0] for r in workload.requests[2:]}
    assert len(shared) == 1
    assert shared.pop().length == 10
    assert len({r.prompt[1] for r in workload.requests[2:]}) == 5
    assert workload_of(made(interval), seed=1) == workload_of(made(interval), seed=1)
    assert workload_of(made(interval), seed=1) != workload_of(made(interval), seed=2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: wanted a JSON object"),
        ("[1]", "line 2: wanted a JSON object"),
        ({"start_s": 1, "adapter": "a"}, "line 2: wanted prompt_tokens, output_tokens"),
        (FIRST | {"adapter": "b", "rank": 0}, "line 2: rank: wanted 1 or more, got 0"),
        (FIRST | {"prompt_tokens": "many"}, "line 2: prompt_tokens: wanted"),
        (FIRST | {"prompt_tokens": True}, "line 2: prompt_tokens: wanted"),
        (FIRST | {"start_s": -1}, "line 2: start_s: wanted 0 or more"),
        (FIRST | {"shared_tokens": 40}, "line 2: wanted shared_tokens below"),
        (FIRST | {"tenant": "x"}, "line 2: wanted keys .*got 'tenant'"),
        ({k: v for k, v in FIRST.items() if k != "rank"} | {"adapter": "c"}, "line 2: .* rank"),
    ],
)
def test_a_wrong_line_is_named(row: object, message: str) -> None:
    line = row if isinstance(row, str) else json.dumps(row)
    with pytest.raises(ValueError, match=message):
        workload_of([json.dumps(FIRST), line])


def test_an_empty_history() -> None:
    with pytest.raises(ValueError, match="at least one request"):
        workload_of(["", "\n"])
