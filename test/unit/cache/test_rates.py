"""Prices from observations, frozen per window."""

import pytest

from sglang_graft.cache import RateMeter, Rates


def test_prefill_of_parts_adds_up_to_the_whole() -> None:
    rates = Rates()
    parts = rates.prefill_seconds(100, 0) + rates.prefill_seconds(28, 100)
    assert parts == pytest.approx(rates.prefill_seconds(128, 0))


def test_nothing_changes_before_the_window_ends() -> None:
    meter = RateMeter()
    before = meter.current
    meter.h2d(2**30, 0.1)
    assert meter.current is before
    assert meter.freeze()
    assert meter.current.h2d_bytes_per_s == 2**30 / 0.1
    assert meter.current.disk_bytes_per_s == before.disk_bytes_per_s


def test_an_empty_or_tiny_window_keeps_the_prices() -> None:
    meter = RateMeter()
    meter.h2d(1000, 1.0)
    assert not meter.freeze()
    assert not meter.freeze()


def test_windows_do_not_mix() -> None:
    meter = RateMeter(smallest_copy=1)
    meter.disk(100, 1.0)
    meter.freeze()
    meter.disk(300, 1.0)
    meter.freeze()
    assert meter.current.disk_bytes_per_s == 300


def test_prefill_is_fitted_over_tokens_and_depth() -> None:
    meter = RateMeter()
    truth = Rates(prefill_s_per_token=2e-5, prefill_s_per_token_pair=3e-9)
    for tokens, depth in [(100, 0), (512, 0), (128, 4096), (2000, 1000)]:
        meter.prefill(tokens, depth, truth.prefill_seconds(tokens, depth))
    assert meter.freeze()
    assert meter.current.prefill_s_per_token == pytest.approx(2e-5)
    assert meter.current.prefill_s_per_token_pair == pytest.approx(3e-9)


def test_one_shape_alone_prices_tokens_only() -> None:
    meter = RateMeter()
    meter.prefill(100, 0, 1.0)
    meter.prefill(100, 0, 3.0)
    meter.freeze()
    assert meter.current.prefill_s_per_token == pytest.approx(0.02)
    assert meter.current.prefill_s_per_token_pair == 0


def test_a_fit_below_zero_is_not_believed() -> None:
    meter = RateMeter()
    meter.prefill(100, 0, 1.0)
    meter.prefill(100, 1000, 0.5)  # deeper, and quicker
    meter.freeze()
    assert meter.current.prefill_s_per_token > 0
    assert meter.current.prefill_s_per_token_pair == 0


def test_old_prefills_are_forgotten() -> None:
    meter = RateMeter(prefills_kept=2)
    for seconds in (100.0, 1.0, 1.0):
        meter.prefill(100, 0, seconds)
    meter.freeze()
    assert meter.current.prefill_s_per_token == pytest.approx(0.01)


@pytest.mark.parametrize("name", ["h2d_bytes_per_s", "disk_bytes_per_s", "prefill_s_per_token"])
def test_rates_of_zero_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: wanted more than 0, got 0"):
        Rates(**{name: 0})


def test_impossible_observations_are_refused() -> None:
    meter = RateMeter()
    with pytest.raises(ValueError, match="copy: got -1 bytes"):
        meter.h2d(-1, 1.0)
    with pytest.raises(ValueError, match="0 tokens"):
        meter.prefill(0, 0, 1.0)


def test_prompts_of_one_forward_add_up() -> None:
    meter = RateMeter()
    truth = Rates(prefill_s_per_token=2e-3, prefill_s_per_token_pair=3e-6)
    for prompts in ([(100, 0), (20, 600)], [(512, 0)], [(128, 4096), (1, 7)]):
        seconds = sum(truth.prefill_seconds(tokens, depth) for tokens, depth in prompts)
        meter.forward(prompts, seconds)
    assert meter.freeze()
    assert meter.prefill_seconds(300, 50) == pytest.approx(truth.prefill_seconds(300, 50))


def test_a_small_change_is_noise() -> None:
    meter = RateMeter()
    meter.h2d(2**30, 2**30 / (1.1 * meter.current.h2d_bytes_per_s))
    assert not meter.freeze()
    meter.h2d(2**30, 2**30 / (1.5 * meter.current.h2d_bytes_per_s))
    assert meter.freeze()
