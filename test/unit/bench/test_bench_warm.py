"""Every shape is sent before anything is timed; the calibration is a plain fit."""

import asyncio

import pytest

from sglang_graft.bench.client import Answer
from sglang_graft.bench.units import Load
from sglang_graft.bench.warm import BURST, Warmer, fit_prefill
from sglang_graft.sim.workloads import Workload

WORKLOAD = Load(name="chat", rate=4.0, seconds=4.0, adapters=4).workload()


def warm(
    base_only: bool = False, error: str = "", workload: Workload = WORKLOAD
) -> tuple[dict[str, object], list[object]]:
    sent: list[object] = []
    seen: set[tuple[int, ...]] = set()

    async def send(prompt: list[int], adapter: str | None, new_tokens: int, answer: Answer) -> None:
        sent.append((len(prompt), adapter))
        took = 2.0 if tuple(prompt) in seen else 5.0
        seen.add(tuple(prompt))
        answer.arrivals += [(1.0, 1), (1.0 + took, new_tokens)]
        answer.tokens, answer.error = [1] * new_tokens, error

    async def flush() -> None:
        sent.append("flush")

    warmer = Warmer(send, workload, 40_000, base_only, flush, lambda: 0.5)
    return asyncio.run(warmer.warm()), sent


def test_every_length_meets_every_rank_and_the_cache_is_empty_afterwards() -> None:
    found, sent = warm()
    lengths = {r.prompt_tokens for r in WORKLOAD.requests}
    before = sent[: sent.index("flush")]
    alone = before[:-BURST]
    for length in (min(lengths), max(lengths)):
        for adapter in (None, "adapter-0", "adapter-1"):  # ranks 16 and 32
            assert (length, adapter) in alone
    assert len(before) > BURST
    assert sent[-1] == "flush"
    assert found["decode_s_per_token_alone"] == pytest.approx(5.0 / 23)


def test_decode_in_a_burst_is_timed_on_cached_prompts() -> None:
    found, sent = warm()
    assert found["decode_s_per_token_burst"] == pytest.approx(2.0 / 23)
    calibration = sent[sent.index("flush") + 1 : -1]
    # 64 is shorter than any prompt of the workload.
    assert calibration[-2 * BURST - 1] != (64, "adapter-0")
    everyone = [(64, f"adapter-{i % 4}") for i in range(BURST)]
    assert calibration[-2 * BURST :] == everyone * 2
    assert (64, "adapter-0") in calibration[: -2 * BURST]


@pytest.mark.parametrize(("adapters", "asked"), [(3, 3), (8, 8), (64, 8)])
def test_the_burst_asks_as_many_adapters_as_stock_has_slots(adapters: int, asked: int) -> None:
    load = Load(name="chat", rate=4.0, seconds=4.0, adapters=adapters)
    _, sent = warm(workload=load.workload())
    burst = sent[-2 * BURST - 1 : -1]
    assert len({entry[1] for entry in burst}) == asked  # type: ignore[index]


def test_base_traffic_is_warmed_with_base_traffic() -> None:
    _, sent = warm(base_only=True)
    assert {entry[1] for entry in sent if entry != "flush"} == {None}  # type: ignore[index]


def test_a_failed_warm_up_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        warm(error="broken")


def test_the_fit_finds_what_made_the_times() -> None:
    rows = [(n, 0.02 + 3e-5 * n + 2e-9 * n * n / 2) for n in (100, 700, 2000, 9000) for _ in "ab"]
    constant, token, pair = fit_prefill(rows)
    assert constant == pytest.approx(0.02, rel=1e-6)
    assert token == pytest.approx(3e-5, rel=1e-6)
    assert pair == pytest.approx(2e-9, rel=1e-6)


def test_no_part_of_the_fit_is_below_zero() -> None:
    assert min(fit_prefill([(10, 0.5), (1000, 0.4), (2000, 0.6)])) >= 0
