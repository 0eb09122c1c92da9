"""Seeded workloads have the protocol's shape."""

import itertools
import statistics

import pytest

from sglang_graft.sim.workloads import (
    FIRST_TOKEN,
    GENERATORS,
    SMALLEST_VOCABULARY,
    AdapterSpec,
    Request,
    Segment,
    Size,
    Workload,
    generate,
    merge,
)

SHAPES = {  # name: adapters, ranks, (prompt of a first turn, output), turns
    "uniform-cold": (32, {16}, {(1024, 64)}, 1),
    "chat": (64, {16, 32}, {(512 + 256, 64)}, 4),
    "translation": (50, {32}, None, 1),
    "agents": (20, {64}, {(2048 + 128, 32)}, 8),
    "swing": (64, {16}, {(128, 64), (16384, 64)}, 2),
    "many": (1000, {8, 16, 32, 64}, {(512 + 256, 64)}, 1),
}


def longest_session(workload: Workload) -> int:
    turns: list[int] = []
    for request in workload.requests:
        turns.append(1 if request.previous is None else turns[request.previous] + 1)
    return max(turns)


@pytest.mark.parametrize("name", GENERATORS)
def test_shape(name: str) -> None:
    adapters, ranks, first, turns = SHAPES[name]
    workload = generate(name, size=Size(requests=1500))
    assert len(workload.adapters) == adapters
    assert {spec.rank for spec in workload.adapters} == ranks
    assert len(workload.requests) == 1500
    assert longest_session(workload) == turns
    opening = [r for r in workload.requests if r.previous is None]
    if first is not None:
        assert {(r.prompt_tokens, r.output.length) for r in opening} == first
    arrivals = [r.arrival_s for r in opening]
    assert arrivals == sorted(arrivals)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_is_a_workload(name: str) -> None:
    size = Size(requests=60)
    assert generate(name, seed=3, size=size) == generate(name, seed=3, size=size)
    assert generate(name, seed=3, size=size) != generate(name, seed=4, size=size)


def test_a_turn_continues_what_was_asked_and_answered() -> None:
    workload = generate("chat", size=Size(requests=100))
    for request in workload.requests:
        if request.previous is not None:
            before = workload.requests[request.previous]
            assert request.prompt[:-1] == (*before.prompt, before.output)
            assert request.adapter == before.adapter
            assert 2 <= request.think_s <= 5


def test_users_of_an_adapter_share_its_system_prompt() -> None:
    workload = generate("agents", size=Size(requests=400))
    tools = {(r.adapter, r.prompt[0]) for r in workload.requests}
    assert len(tools) == len({adapter for adapter, _ in tools})


def test_translation_comes_in_bursts_and_its_favourites_change() -> None:
    requests = generate("translation", size=Size(requests=3000)).requests
    times = [r.arrival_s for r in requests]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.stdev(gaps) / statistics.mean(gaps) > 2.5
    assert all(128 <= r.prompt_tokens == r.output.length <= 512 for r in requests)
    first = [r.adapter for r in requests if r.arrival_s < 60]
    later = [r.adapter for r in requests if 120 <= r.arrival_s < 180]
    assert statistics.mode(first) != statistics.mode(later)


def test_swing_alternates() -> None:
    for request in generate("swing", size=Size(requests=1500)).requests:
        if request.previous is None:
            many = int(request.arrival_s // 60) % 2 == 0
            assert (request.adapter != 0) == many
            assert (request.prompt_tokens == 128) == many


def test_popularity_of_many_follows_its_law() -> None:
    requests = generate("many", size=Size(requests=4000)).requests
    counts: dict[int, int] = {}
    for request in requests:
        counts[request.adapter] = counts.get(request.adapter, 0) + 1
    top = sorted(counts.values(), reverse=True)
    assert top[1] / top[0] == pytest.approx(2**-1.1, rel=0.2)  # the noise of about 700 draws
    assert len(counts) > 300


def test_keys_make_distinct_tokens_and_equal_keys_equal_ones() -> None:
    firsts = {tuple(Segment(key, 8).tokens()[:3]) for key in range(1, 40000)}
    assert len(firsts) == 39999
    one = Segment(7, 70000).tokens()
    assert one == Segment(7, 70000).tokens()
    assert len(one) == 70000
    assert min(one) >= FIRST_TOKEN
    assert max(one) < SMALLEST_VOCABULARY


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("chats", Size(), "WORKLOAD: wanted one of uniform-cold, chat, .*; got 'chats'"),
        ("chat", Size(requests=1), "--requests: wanted 2 or more, got 1"),
        ("chat", Size(adapters=1), "--adapters: wanted 2 or more, got 1"),
        ("chat", Size(rate=0.0), "--rate: wanted more than 0"),
    ],
)
def test_wrong_wishes(name: str, size: Size, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(name, size=size)


def keys(workload: Workload) -> set[int]:
    return {s.key for r in workload.requests for s in (*r.prompt, r.output)}


def test_merged_workloads_come_by_arrival_and_share_nothing() -> None:
    parts = [generate(name, size=Size(requests=80, adapters=5)) for name in GENERATORS]
    merged = merge(parts)
    assert len(merged.requests) == 80 * len(parts)
    assert len(keys(merged)) == sum(len(keys(part)) for part in parts)
    names = [f"{part.name}-{spec.name}" for part in parts for spec in part.adapters]
    assert [spec.name for spec in merged.adapters] == names
    arrivals = [r.arrival_s for r in merged.requests]
    assert arrivals == sorted(arrivals)


def test_each_workload_is_as_it_was_within_a_merged_one() -> None:
    parts = [generate(name, seed=2, size=Size(requests=60, adapters=5)) for name in GENERATORS]
    merged, base = merge(parts), 0
    for part in parts:
        own = range(base, base + len(part.adapters))
        places = [i for i, r in enumerate(merged.requests) if r.adapter in own]
        assert len(places) == len(part.requests)
        for request, place in zip(part.requests, places, strict=True):
            found = merged.requests[place]
            before = None if request.previous is None else places[request.previous]
            assert found.previous == before
            assert before is None or before < place
            assert found.adapter - base == request.adapter
            assert (found.arrival_s, found.think_s) == (request.arrival_s, request.think_s)
            assert merged.adapters[found.adapter].rank == part.adapters[request.adapter].rank
            # Equal segments stay equal, within one workload.
            shift = found.output.key - request.output.key
            assert [(s.key - shift, s.length, s.generated) for s in found.prompt] == [
                (s.key, s.length, s.generated) for s in request.prompt
            ]
        base += len(part.adapters)


def test_a_later_turn_without_a_time_stays_behind_its_first() -> None:
    answer = Segment(2, 2, generated=True)
    first = Request(0, (Segment(1, 4),), answer, 5.0)
    later = Request(0, (Segment(1, 4), answer), Segment(3, 2, generated=True), previous=0)
    other = Request(0, (Segment(1, 4),), answer, 3.0)
    adapters = (AdapterSpec("a", 8),)
    merged = merge(
        [Workload("one", 4, adapters, (first, later)), Workload("two", 0, adapters, (other,))]
    )
    assert (merged.name, merged.seed) == ("one+two", 4)
    assert [(r.arrival_s, r.previous) for r in merged.requests] == [
        (3.0, None),
        (5.0, None),
        (0.0, 1),
    ]


def test_what_cannot_be_merged() -> None:
    one = generate("chat", size=Size(requests=4))
    with pytest.raises(ValueError, match="got none"):
        merge([])
    with pytest.raises(ValueError, match="got chat, chat"):
        merge([one, one])
