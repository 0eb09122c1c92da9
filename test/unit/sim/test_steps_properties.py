"""One GPU, one forward at a time: against a queue, and against a loop over every step."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from helpers_steps import RATES, STEPS, TOKEN_S, played, prepared, request
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st

from sglang_graft.sim.replay import Replay
from sglang_graft.sim.steps import Served, _Gpu
from sglang_graft.sim.workloads import Request, Segment

SIXTEENTHS = st.integers(16, 816).map(lambda n: n / 16)


@given(st.lists(SIXTEENTHS, min_size=1, max_size=20))
@settings(deadline=None, max_examples=50)
def test_without_decode_and_batches_it_is_a_single_server_queue(arrivals: list[float]) -> None:
    arrivals = sorted(arrivals)
    found = played(
        [request(at, 1 + i, prompt=4, output=1) for i, at in enumerate(arrivals)],
        chunk_tokens=4,  # a prompt is a forward
    )
    free_at, wanted = 0.0, []
    for at in arrivals:
        free_at = max(at, free_at) + 1.0 + 4 * TOKEN_S
        wanted.append(free_at)
    assert found.first_s == found.end_s == wanted


@dataclass(slots=True)
class _Naive:
    left: int  # tokens of the prompt
    more: int  # tokens after the first
    tokens: int  # of both, and of the whole answer


def one_step_after_the_other(requests: list[Request], chunk: int) -> tuple[list[float], ...]:
    """(first_s, end_s) of requests that share nothing, with room for all; a loop over forwards."""
    states = [_Naive(r.prompt_tokens, r.output.length - 1, len(r.tokens())) for r in requests]
    order = sorted(range(len(requests)), key=lambda i: (requests[i].arrival_s, i))
    first, end, now = [0.0] * len(states), [0.0] * len(states), 0.0
    while any(end_s == 0 for end_s in end):
        prompts = [i for i in order if requests[i].arrival_s <= now and states[i].left]
        decoding = [i for i in order if states[i].left == 0 and end[i] == 0]
        if prompts:
            room, done = chunk, []
            for i in prompts:
                part = min(room, states[i].left)
                states[i].left -= part
                room -= part
                done += [i] if part and not states[i].left else []
            now += 1.0 + (chunk - room) * TOKEN_S
            for i in done:
                first[i] = now
                end[i] = 0.0 if states[i].more else now
        elif decoding:
            read = sum(states[i].tokens - states[i].more for i in decoding)
            now += 0.5 + 0.125 * (len(decoding) - 1) + read / 16
            for i in decoding:
                states[i].more -= 1
                end[i] = 0.0 if states[i].more else now
        else:
            now = min(requests[i].arrival_s for i in order if states[i].left)
    return first, end


TRAFFIC = st.lists(
    st.tuples(SIXTEENTHS, st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=12
)


def made(traffic: list[tuple[float, int, int]]) -> list[Request]:
    return [request(at, 1 + i, p, o, adapter=i % 2) for i, (at, p, o) in enumerate(traffic)]


@given(TRAFFIC, st.sampled_from([3, 8, 8192]))
@settings(deadline=None, max_examples=100)
def test_steps_taken_at_once_are_steps_one_after_the_other(
    traffic: list[tuple[float, int, int]], chunk: int
) -> None:
    found = played(made(traffic), chunk_tokens=chunk)
    first, end = one_step_after_the_other(made(traffic), chunk)
    assert found.first_s == pytest.approx(first)
    assert found.end_s == pytest.approx(end)


def retractions(gpu: _Gpu) -> list[tuple[int, int]]:
    """Serves all; (request, tokens of its answer that it had made) of each that was retracted."""
    found: list[tuple[int, int]] = []
    before: dict[int, int] = {}
    while gpu.step():
        gpu.run.check_invariants()
        # Between two retractions of one request its entry is gone for a step at least.
        found += [entry for entry in gpu.retracted.items() if entry[0] not in before]
        before = dict(gpu.retracted)
    assert len(found) == gpu.served.retractions
    return found


def check_tokens(run: Replay, found: Served, retracted: list[tuple[int, int]]) -> None:
    """What was not cached is computed once, and what was lost, and no more, once again."""
    requests = run.trace.workload.requests
    least = sum(r.prompt_tokens for r in requests) - sum(found.cached)
    least += sum(made for _, made in retracted)
    most = least + sum(requests[i].prompt_tokens for i, _ in retracted)
    # Of a prompt the last token at least is computed again.
    assert least + len(retracted) <= found.prefill_tokens <= most
    assert found.prefill_tokens * TOKEN_S == run.totals.prefill_seconds
    answers = sum(r.output.length - 1 for r in requests)
    assert found.decode_tokens == answers - len(retracted)
    assert run.totals.requests == len(requests)


@given(TRAFFIC, st.integers(14, 40), st.integers(1, 12))
@settings(deadline=None, max_examples=100)
def test_every_token_is_made_once_and_the_gpu_does_one_thing_at_a_time(
    traffic: list[tuple[float, int, int]], pages: int, chunk: int
) -> None:
    requests = made(traffic)
    run = prepared(requests, pages=pages, chunk_tokens=chunk)
    gpu = _Gpu(run, STEPS)
    check_tokens(run, gpu.served, retractions(gpu))
    found = gpu.served
    assert sum(found.cached) == run.totals.device_tokens + run.totals.host_tokens == 0
    assert found.prefill_s + found.decode_s <= max(found.end_s) - min(found.ready_s) + 1e-6
    for asked, ttft, first, end in zip(
        requests, found.ttft_s(), found.first_s, found.end_s, strict=True
    ):
        assert ttft >= 1.0 + asked.prompt_tokens * TOKEN_S - 1e-6
        assert end >= first + (asked.output.length - 1) * 0.5 - 1e-6


# Each has its first token before the next one comes, and their answers have no room together.
SHORT_OF_MEMORY = [(3.0, 4, 12), (7.0, 4, 12), (11.0, 4, 12)]


@given(TRAFFIC, st.integers(20, 60), st.sampled_from([1.0, 2.0**60]), st.sampled_from([0, 8e-7]))
@example(SHORT_OF_MEMORY, 32, 2.0**60, 0)
@example(SHORT_OF_MEMORY, 24, 2.0**60, 8e-7)
@settings(deadline=None, max_examples=100)
def test_whoever_is_retracted_is_served_once(
    traffic: list[tuple[float, int, int]], pages: int, h2d: float, host_gb: float
) -> None:
    """At first nothing is kept for answers. Prompts begin alike. With and without a host tier of
    100 pages."""
    began = request(0.0, 900, prompt=2, output=30)
    later = [replace(r, prompt=(Segment(7, 5), *r.prompt)) for r in made(traffic)]
    run = prepared(
        [began, *later],
        pages=pages,
        rates=replace(RATES, h2d_bytes_per_s=h2d),
        host_gb=host_gb,
    )
    gpu = _Gpu(run, STEPS)
    gpu.reserve.ratio = 0.0
    retracted = retractions(gpu)
    found = gpu.served
    check_tokens(run, found, retracted)
    assert all(map(lambda first, end: 0 < first <= end, found.first_s, found.end_s))
    if traffic is SHORT_OF_MEMORY:
        assert retracted
    event(f"retracted {min(found.retractions, 3)}")


@given(TRAFFIC, st.integers(1, 12), st.integers(14, 40))
@settings(deadline=None, max_examples=100)
def test_a_request_behind_all_others_shortens_nobodys_wait(
    traffic: list[tuple[float, int, int]], prompt: int, pages: int
) -> None:
    requests = made(traffic)
    last = request(max(at for at, _, _ in traffic), 500, prompt, 4)
    without, with_it = played(requests, pages=pages), played([*requests, last], pages=pages)
    assume(not without.retractions and not with_it.retractions)
    for before, after in zip(without.first_s, with_it.first_s, strict=False):
        assert after >= before - 1e-6


def test_a_request_before_others_may_shorten_their_wait() -> None:
    """As in a server: a forward that both share costs its constant once. So no sum of waits is sure
    to grow with the requests."""
    steps = replace(STEPS, prefill_s=64.0)
    two = [request(63.0, 1, 4, 1), request(64.0, 2, 4, 1)]
    before = request(0.0, 3, 2, 1)  # is done at 64.5
    without, with_it = played(two, steps), played([*two, before], steps)
    assert sum(with_it.ttft_s()[:2]) < sum(without.ttft_s())


def test_with_more_memory_requests_wait_less() -> None:
    several = [request(i / 16, 1 + i, 8, 8) for i in range(12)]
    means = [sum(played(several, pages=pages).ttft_s()) for pages in (10, 20, 40, 120)]
    assert all(less >= more for less, more in pairwise(means))
