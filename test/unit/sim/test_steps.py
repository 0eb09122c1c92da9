"""One GPU, one forward at a time, by hand."""

from dataclasses import replace

import pytest
from helpers_steps import RATES, STEPS, TOKEN_S, played, prepared, request

from sglang_graft.sim.steps import Steps, _Gpu, serve
from sglang_graft.sim.workloads import Request, Segment


def test_a_request_alone_takes_a_prefill_and_its_steps() -> None:
    found = played([request(2.0, 1, prompt=8, output=5)])
    assert found.ttft_s() == [1.0 + 8 * TOKEN_S]
    assert found.end_s == [found.first_s[0] + 4 * 0.5 + (9 + 10 + 11 + 12) / 16]


def test_who_comes_amid_a_step_waits_for_its_rest_and_stops_decode() -> None:
    steps = replace(STEPS, read_bytes_per_s=2.0**60)
    first = request(0.0, 1, prompt=4, output=11)
    # The first one's prefill ends at 2; its steps would end at 2.5, 3, ... 7.
    found = played([first, request(2.75, 2, prompt=4, output=1)], steps)
    assert found.first_s == pytest.approx([2.0, 3.0 + 2.0])
    assert found.end_s == pytest.approx([7.0 + 2.0, 5.0])


def test_a_step_grows_with_its_requests_and_their_kv() -> None:
    twins = [request(0.0, key, prompt=4, output=3) for key in (1, 2)]
    found = played(twins)
    assert found.first_s == [1.0 + 8 * TOKEN_S] * 2  # one forward for both
    assert found.end_s == [3.0 + 2 * (0.5 + 0.125) + 2 * (5 + 6) / 16] * 2


def test_a_long_prompt_is_computed_in_forwards_without_a_step_between() -> None:
    steps = replace(STEPS, read_bytes_per_s=2.0**60)
    both = [request(0.0, 1, prompt=4, output=5), request(2.0, 2, prompt=10, output=1)]
    found = played(both, steps, chunk_tokens=4)
    # It comes when a step may begin, and takes three forwards of 4, 4 and 2 tokens.
    assert found.first_s == [2.0, 2.0 + 3 * 1.0 + 10 * TOKEN_S]
    assert found.end_s[0] == pytest.approx(found.first_s[1] + 4 * 0.5)


def test_what_is_left_of_a_forward_goes_to_the_next_prompt() -> None:
    both = [request(0.0, 1, prompt=6, output=1), request(0.0, 2, prompt=4, output=1)]
    found = played(both, chunk_tokens=8)
    assert found.first_s == [1.0 + 8 * TOKEN_S, 2.0 + 10 * TOKEN_S]


def test_who_has_no_room_waits_until_somebody_ends() -> None:
    both = [request(0.0, key, prompt=4, output=4) for key in (1, 2)]
    # The first one holds a page of weights, two of its prompt and one for a token, and is promised
    # two and one to round; the second one needs as much without weights, and one page more is left.
    wide, less, narrow = (played(both, pages=pages) for pages in (13, 12, 10))
    assert wide.first_s[1] == wide.first_s[0]
    # After the first prefill of an idle server it is tried again. The first one is promised 0.7 of
    # three tokens then, beside five pages for the second one: 11 pages would do.
    assert played(both, pages=11).first_s == less.first_s == [2.0, 4.0]
    assert narrow.first_s[1] == narrow.end_s[0] + 2.0
    assert played(both, max_running=1).first_s == narrow.first_s


def two(lag_s: float, at: float = 0.0, key: int = 1) -> list[Request]:
    """Each needs 502 pages beside one of weights; a step takes half a second."""
    times = (at, at + lag_s)
    return [request(came, key + i, prompt=4, output=1000) for i, came in enumerate(times)]


EQUAL = replace(STEPS, decode_s_per_request=0.0, read_bytes_per_s=2.0**60)


def test_a_part_of_what_running_answers_may_need_is_kept_for_them() -> None:
    # After 400 steps the first one holds 203 pages and its weights and has 599 tokens to go; the
    # second needs 503 pages with one to round. For the first 0.7 - 400 * 0.602 / 600 of those are
    # kept, 179 tokens or 89.5 pages, and not 300 pages: 797 pages are the fewest.
    lag = 2.0 + 400 * 0.5
    fits, waits = (played(two(lag), EQUAL, pages=pages) for pages in (797, 796))
    assert fits.first_s[1] == pytest.approx(lag + 2)
    assert waits.first_s[1] == pytest.approx(waits.end_s[0] + 2)
    # When it comes soon, more is kept.
    assert played(two(3), EQUAL, pages=797).retractions == 0
    assert played(two(3), EQUAL, pages=797).first_s[1] > 500


def test_who_has_no_first_token_is_promised_all_of_its_answer() -> None:
    # Weights, 503 pages with one to round for each, and one page more; for a prefill each, 0.7 of
    # the first answer is enough.
    together, apart = (played(two(0), EQUAL, pages=pages) for pages in (1009, 1008))
    assert together.first_s == [3, 3]
    assert apart.first_s == [2, 4]


def test_beside_running_requests_who_does_not_fit_is_not_tried_after_a_prefill() -> None:
    # 0.7 of two answers would leave room for the third request when the second one has
    # its first token; the whole of the second one's does not.
    began = request(0.0, 9, prompt=4, output=2000)
    found = played([began, *two(0, at=10)], EQUAL, pages=1650)
    assert found.first_s[1] == pytest.approx(12, abs=0.6)
    assert found.first_s[2] == pytest.approx(found.end_s[1] + 2)
    assert found.retractions == 0


def test_after_a_pause_the_ratio_is_as_at_first() -> None:
    first, again = two(3), two(3, at=5000, key=10)
    alone, both = (played(way, EQUAL, pages=797) for way in (first, [*first, *again]))
    assert both.ttft_s()[2:] == pytest.approx(alone.ttft_s())
    assert both.first_s[2] > both.end_s[1]


def test_once_somebody_does_not_fit_nobody_is_tried_before_an_end() -> None:
    # The small one would fit at once, and would end before the first one.
    small = request(20.0, 50, prompt=4, output=2)
    found = played([*two(10), small], EQUAL, pages=700)
    assert found.first_s[1] == found.first_s[2] == pytest.approx(found.end_s[0] + 2 + 1)


def test_who_has_made_least_is_retracted_and_computes_it_again() -> None:
    run = prepared(two(152), pages=800)
    found = serve(run, EQUAL)
    assert found.retractions == 1
    assert found.first_s[1] == pytest.approx(154, abs=0.6)  # of the time before
    # Its prompt without the last page is cached. What it had made is computed as a prompt, which
    # makes one token more.
    made = found.prefill_tokens - 4 - 4 - 2
    assert 300 < made < 999
    assert found.decode_tokens == 2 * 999 - 1
    left = 1000 - made - 1
    assert found.end_s[1] == pytest.approx(found.end_s[0] + 1 + (made + 2) * TOKEN_S + left * 0.5)
    assert run.totals.requests == 2  # it is no new demand
    assert (run.totals.adapter_loads, run.totals.adapter_hits) == (1, 1)
    assert found.cached == [0, 0]


def test_after_a_retraction_others_are_tried_behind_one_step() -> None:
    # The small one does not fit when it comes, as memory is about to run out.
    run = prepared([*two(152), request(465.0, 50, prompt=4, output=2)], pages=800)
    gpu = _Gpu(run, EQUAL)
    while not gpu.served.retractions:
        assert gpu.step()
    stayed = gpu._made(int(gpu.clock.running[0][0]), 0) - 1
    assert gpu.now > 465
    assert gpu.reserve.ratio == (stayed + 20) / 1001  # falls with the next step
    tried = gpu.now
    while gpu.step():
        pass
    assert gpu.served.first_s[2] == tried + 2 < gpu.served.end_s[0] < gpu.served.end_s[1]


def test_who_finds_no_page_beside_prompts_under_way_waits_for_them() -> None:
    slow = replace(RATES, h2d_bytes_per_s=2.0**-7)  # weights take 1024 s
    asked = [request(0.0, 1, prompt=2, output=40), request(1030.0, 2, 20, 2, adapter=1)]
    run = prepared(asked, pages=30, rates=slow)
    gpu = _Gpu(run, EQUAL)
    while gpu.step():
        # So that the second one, of 12 pages and a token, has room when it comes.
        gpu.reserve.ratio = 0.0
    # The first one can make 33 tokens, needs more, and goes on when the second one is computed.
    assert gpu.served.first_s == pytest.approx([1024 + 1.5, 2054 + 6])
    assert gpu.served.end_s[0] == pytest.approx(2060 + (40 - 33) * 0.5, abs=1.1)
    assert gpu.served.decode_s < 22


def test_of_equals_the_longest_prompt_is_retracted() -> None:
    # They come while the first one runs, one forward computes both, and they grow together.
    others = [request(202.0, 2, prompt=4, output=400), request(202.0, 3, prompt=8, output=400)]
    found = played([request(0.0, 1, prompt=4, output=1000), *others], EQUAL, pages=720)
    assert found.retractions == 1
    assert found.first_s[1] == found.first_s[2]
    assert found.end_s[1] < found.end_s[2] - 50


def test_a_later_request_goes_ahead_of_one_whose_weights_are_under_way() -> None:
    slow = replace(RATES, h2d_bytes_per_s=1.0)  # a page takes 8 s
    three = [
        request(0.0, 1, prompt=4, output=2),
        request(20.0, 2, prompt=4, output=1, adapter=1),
        request(21.0, 3, prompt=4, output=1),
    ]
    found = played(three, rates=slow)
    assert found.ttft_s() == pytest.approx([8 + 2, 8 + 2, 2])


def test_who_finds_weights_that_are_under_way_waits_for_them() -> None:
    slow = replace(RATES, h2d_bytes_per_s=1.0)
    found = played([request(float(at), 1 + at, prompt=4, output=1) for at in (0, 3)], rates=slow)
    assert found.first_s == pytest.approx([8 + 3, 8 + 3])  # together


def test_a_turn_comes_when_its_user_has_thought_and_finds_what_was_said() -> None:
    first = request(0.0, 1, prompt=4, output=4)
    again = replace(
        request(0.0, 2, prompt=4, output=1),
        prompt=(*first.prompt, first.output, Segment(2, 4)),
        previous=0,
        think_s=7.0,
    )
    found = played([first, again])
    assert found.ready_s[1] == found.end_s[0] + 7
    assert found.cached == [0, 8]
    assert found.ttft_s()[1] == 1 + 4 * TOKEN_S


@pytest.mark.parametrize("name", ["decode_s", "read_bytes_per_s", "prefill_s"])
def test_prices_below_nothing_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: wanted"):
        Steps(**{name: -1.0})


# From 1 on: beside 0, copies that take next to nothing would still take some time.
