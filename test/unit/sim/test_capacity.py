"""Planning on tiny traces: queues by hand, cheapest first, whole conversations."""

from dataclasses import replace

import pytest
from helpers_sim import OPTIONS, asked

from sglang_graft.sim.capacity import Goal, Model, plan, predict, shares
from sglang_graft.sim.steps import Steps
from sglang_graft.sim.workloads import AdapterSpec, Request, Size, Workload, generate

ADAPTERS = (AdapterSpec("adapter-0", 1), AdapterSpec("adapter-1", 1))
# 8 bytes a page, 40 pages.
BUDGET_GB = 40 * 8e-9
STEPS = Steps(prefill_s=0.0, decode_s=1.0, decode_s_per_request=0.0, read_bytes_per_s=1e15)
MODEL = Model(options=replace(OPTIONS, host_gb=0.0), policy="lru", steps=STEPS)


def workload(*requests: Request) -> Workload:
    return Workload("tiny", 0, ADAPTERS, requests)


def test_a_prediction_by_hand() -> None:
    # Two prompts of 4 tokens: each computes 4 * 3 s and 4 * 2 pairs * 1 s = 20 s; the adapter is
    # read (4 s) and copied (1 s) first. Both are one forward.
    found = predict(
        workload(asked(0, 0.0, 1, output=5), asked(0, 0.0, 2, output=6)), BUDGET_GB, MODEL
    )
    assert found["ttft_s"]["mean"] == pytest.approx(45)
    assert found["adapter_loads"] == 1
    assert found["prefix_hit_rate"] == 0
    slow = replace(MODEL, steps=replace(STEPS, prefill_s=2.0))
    later = predict(workload(asked(0, 0.0, 1, output=5)), BUDGET_GB, slow)
    assert later["ttft_s"]["mean"] == pytest.approx(27)


def test_waiting_for_room_counts() -> None:
    requests = [asked(0, 0.0, i, output=50 + i, length=8) for i in range(1, 4)]
    slow = replace(MODEL, steps=replace(STEPS, decode_s=100.0))
    wide = predict(workload(*requests), BUDGET_GB, slow)
    # Each needs 5 pages beside one of weights: they run one after the other, decode included.
    narrow = predict(workload(*requests), 6.5 * 8e-9, slow)
    assert narrow["ttft_s"]["p99"] > wide["ttft_s"]["p99"]


def test_two_replicas_halve_a_queue() -> None:
    requests = [asked(i % 2, 0.0, i, output=50 + i) for i in range(1, 9)]
    way = replace(MODEL, routing="round-robin")
    one, two = (predict(workload(*requests), BUDGET_GB, way, count) for count in (1, 2))
    assert two["ttft_s"]["p99"] < 0.6 * one["ttft_s"]["p99"]
    assert two["busiest_over_mean"] == 1.0


@pytest.mark.parametrize("routing", ["affinity", "random", "round-robin", "least-loaded"])
def test_conversations_stay_together_and_nothing_is_lost(routing: str) -> None:
    whole = generate("chat", size=Size(requests=200))
    parts = shares(whole, 3, routing)
    assert sum(len(part.requests) for part in parts) == 200
    outputs = {r.output for part in parts for r in part.requests}
    assert outputs == {r.output for r in whole.requests}
    for part in parts:
        for request in part.requests:
            if request.previous is not None:
                before = part.requests[request.previous]
                assert before.output in request.prompt
                assert before.adapter == request.adapter
    if routing == "affinity":
        together = [len({r.adapter for r in part.requests}) for part in parts]
        apart = [len({r.adapter for r in part.requests}) for part in shares(whole, 3, "random")]
        assert sum(together) < sum(apart)


def test_the_cheapest_that_meets_the_goal_ends_the_search() -> None:
    requests = [asked(i % 2, 0.0, i, output=50 + i) for i in range(1, 9)]
    way = replace(MODEL, routing="round-robin")
    rows = list(
        plan(workload(*requests), [BUDGET_GB, 1e-9], [0.0], [4, 1, 2], Goal(ttft_s=100), way)
    )
    assert [(row["replicas"], row["budget_gb"]) for row in rows] == [
        (1, 1e-9),
        (1, BUDGET_GB),
        (2, 1e-9),
        (2, BUDGET_GB),
    ]
    assert [row["met"] for row in rows] == [False, False, False, True]
    assert rows[0]["problem"].startswith("request 0 needs 4 pages with its adapter")
    assert rows[0]["problem"].endswith("raise --budget-gb")


def test_a_host_tier_saves_reads() -> None:
    requests = [asked(i % 2, 1000.0 * i, i, output=50 + i, length=16) for i in range(1, 9)]
    # Room for one adapter beside one request: without a host, each load is a read.
    tight = 10.5 * 8e-9
    without = replace(MODEL, options=replace(OPTIONS, host_gb=0.0))
    with_host = replace(MODEL, options=replace(OPTIONS, host_gb=8e-7))
    none, some = (predict(workload(*requests), tight, way) for way in (without, with_host))
    assert some["disk_reads"] < none["disk_reads"]
    assert some["ttft_s"]["mean"] < none["ttft_s"]["mean"]


def test_a_goal_of_nothing() -> None:
    with pytest.raises(ValueError, match="--goal-ms"):
        Goal(ttft_s=0)
