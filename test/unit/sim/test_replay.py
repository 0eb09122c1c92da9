"""Replays of traces that are small enough to be worked out by hand (figures in helpers_sim)."""

from dataclasses import replace

import pytest
from helpers_sim import OPTIONS, RATES, asked, tiny

from sglang_graft.sim.compare import Bench, Options, bench, compare
from sglang_graft.sim.replay import Replay
from sglang_graft.sim.schedule import Server, schedule
from sglang_graft.sim.workloads import Request, Segment, Size

POLICIES = ("cost", "elora", "lru")
FIRST = 4 + 1 + (4 * 3 + 4 * 2)  # read, copy and compute 4 tokens
AGAIN = 2 * 3 + 2 * (2 + 1)  # the last page is computed each time


def ready(requests: list[Request], pages: int, *, host_pages: int = 0) -> Bench:
    trace = tiny(requests)
    options = replace(OPTIONS, host_gb=host_pages * trace.sizes.page_bytes / 1e9)
    return bench(trace, (pages + 0.5) * trace.sizes.page_bytes / 1e9, options)


def cost(requests: list[Request], pages: int, policy: str, *, host_pages: int = 0) -> float:
    return ready(requests, pages, host_pages=host_pages).replay(policy).totals.cost_seconds


TWICE = [asked(0, 0, 1, output=2), asked(0, 1000, 1, output=3)]
BETWEEN = [asked(0, 0, 1, output=2), asked(1, 1000, 4, output=5), asked(0, 2000, 1, output=6)]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_second_request_computes_its_last_page_only(policy: str) -> None:
    assert cost(TWICE, 8, policy) == FIRST + AGAIN


@pytest.mark.parametrize("policy", POLICIES)
def test_what_had_to_leave_is_paid_for_again(policy: str) -> None:
    assert cost(BETWEEN, 4, policy) == 3 * FIRST


@pytest.mark.parametrize("policy", POLICIES)
def test_a_page_to_spare_keeps_the_weights_which_leave_last(policy: str) -> None:
    assert cost(BETWEEN, 5, policy) == 3 * FIRST - 5


@pytest.mark.parametrize("policy", POLICIES)
def test_the_host_brings_back_weights_and_kv_by_copies(policy: str) -> None:
    found = ready(BETWEEN, 4, host_pages=20).replay(policy)
    # The third request copies a page of weights and a node of KV, whose two pages move together.
    assert found.totals.cost_seconds == 2 * FIRST + 1 + 2 + AGAIN
    assert (found.totals.host_tokens, found.totals.disk_reads) == (2, 2)


def test_what_came_in_is_copied_before_the_next_load() -> None:
    run = ready(BETWEEN, 4, host_pages=20).prepared("lru")
    admit = [[(index, 0)] for index in range(3)]
    for _ in range(2):  # its weights are read in one pass, and loaded in the next one
        run.begin_pass(admit[0], 0.0)
    assert run.may_start(0, 0)
    run.admit(0)
    run.end(0)
    assert run.tiers.moved.stored == 0
    for _ in range(2):
        run.begin_pass(admit[1], 1000.0)
    assert run.may_start(1, 0)
    assert run.tiers.moved.stored, "copied before the load evicts it"
    run.admit(1)
    run.end(1)
    assert run.tree.dropped_pages == 0
    run.begin_pass(admit[2], 2000.0)
    assert run.may_start(2, 0)
    assert run.admit(2).known == 2
    run.end(2)
    run.check_invariants()


def test_a_copy_dearer_than_prefill_is_left() -> None:
    slow = replace(OPTIONS, rates=replace(RATES, h2d_bytes_per_s=0.01), host_gb=1e-6)
    trace = tiny(BETWEEN)
    found = bench(trace, 4.5 * 8 / 1e9, slow).replay("cost")
    assert found.totals.host_tokens == 0
    assert found.totals.disk_reads == 2


def test_without_the_dependency_rule_kv_stays_behind() -> None:
    b = ready(BETWEEN, 6)
    b.options = replace(b.options, dependency_rule=False)
    totals = b.replay("lru").totals
    assert totals.invalid_kv_pages > 0
    assert b.options.check  # each step was checked
    b.options = replace(b.options, dependency_rule=True)
    assert b.replay("lru").totals.invalid_kv_pages == 0


def test_prefetch_takes_the_copy_out_of_the_wait() -> None:
    # The second request comes while the device computes the first (20 s from second 5 on).
    both = [asked(0, 0, 1, output=2), asked(1, 1, 4, output=5)]
    ahead = ready(both, 20)
    behind = ready(both, 20)
    behind.options = replace(behind.options, prefetch=False)
    assert ahead.replay("lru").ttft_s == [25, 25 + 20 - 1]
    assert behind.replay("lru").ttft_s == [25, 25 + 5 + 20 - 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_idle_promotion_brings_back_what_has_room(policy: str) -> None:
    # The second request leaves a free page: its answer's only token fills no page.
    short = Request(1, asked(1, 0, 4, output=5).prompt, Segment(5, 1, generated=True), 1000)
    b = ready([BETWEEN[0], short, BETWEEN[2]], 4, host_pages=20)
    without = b.replay(policy)
    b.options = replace(b.options, idle_promotion=True)
    found = b.replay(policy)
    assert (without.totals.idle_bytes, found.totals.idle_bytes) == (0, 8)
    assert found.totals.cost_seconds == without.totals.cost_seconds - 1
    assert found.ttft_s == [*without.ttft_s[:2], without.ttft_s[2] - 1]


def test_nothing_is_promoted_while_a_request_waits() -> None:
    short = Request(1, asked(1, 0, 4, output=5).prompt, Segment(5, 1, generated=True), 1)
    b = ready([BETWEEN[0], short, asked(0, 2, 1, output=6)], 4, host_pages=20)
    b.options = replace(b.options, idle_promotion=True)
    assert b.replay("lru").totals.idle_bytes == 0


def test_the_schedule_is_one_for_all_and_counts_shared_pages_once() -> None:
    twins = [asked(0, 0, 1, output=2), asked(0, 0, 1, output=3)]
    plan = schedule(tiny(twins), Server(pages=9, rates=RATES, decode_s_per_token=100))
    assert [event.admitted for event in plan.events] == [True, True, False, False]
    assert plan.held == [1 + 3, 1 + 3 + 1]  # the second adds only its output


def test_a_turn_waits_for_the_one_before_it_and_for_its_user() -> None:
    first = asked(0, 5, 1, output=2)
    second = Request(
        0, (*first.prompt, first.output), asked(0, 0, 9, output=3).output, previous=0, think_s=7
    )
    plan = schedule(tiny([first, second]), Server(pages=20, rates=RATES, decode_s_per_token=1))
    assert plan.ready_s == [5, 5 + 20 + 2 + 7]


def test_requests_wait_in_order_while_the_pool_is_full() -> None:
    three = [asked(i % 2, i, 10 * i + 1, output=10 * i + 2) for i in range(3)]
    plan = schedule(tiny(three), Server(pages=4, rates=RATES, decode_s_per_token=1))
    order = [(event.request, event.admitted) for event in plan.events]
    assert order == [(0, True), (0, False), (1, True), (1, False), (2, True), (2, False)]


def test_a_request_larger_than_the_device_is_named() -> None:
    with pytest.raises(ValueError, match=r"request 0 needs 4 pages .* 3 pages: raise --budget-gb"):
        schedule(tiny(TWICE), Server(pages=3, rates=RATES))


def test_a_host_too_small_for_an_adapter_is_refused() -> None:
    trace = tiny([asked(0, 0, 1, output=2)], ranks=(4, 1))
    with pytest.raises(ValueError, match=r"--host-gb: wanted room for 4 pages.*got 2"):
        bench(trace, 1e-6, replace(OPTIONS, host_gb=2 * 8 / 1e9)).replay("lru")


class Watched(Replay):
    """Compares what the tree holds after each admission with the schedule's own count."""

    admitted = 0

    def _keep(self, *parts: object) -> None:
        super()._keep(*parts)
        from sglang_graft.pool.ledger import Owner

        held = self.tree.protected + self.ledger.count(Owner.KV_RUNNING)
        assert held == self.plan.held[self.admitted]
        self.admitted += 1


@pytest.mark.parametrize("name", ["chat", "agents", "swing"])
def test_the_schedule_knows_what_requests_hold(name: str) -> None:
    from sglang_graft.sim.sizes import Sizes
    from sglang_graft.sim.trace import Trace
    from sglang_graft.sim.workloads import generate

    trace = Trace(generate(name, size=Size(requests=60)), Sizes())
    b = bench(trace, 8, Options())
    run = Watched(trace, b.plan, b.server, b.policy("lru"))
    run.run()
    assert run.admitted == 60


def test_rows_carry_the_promised_names() -> None:
    size = Size(requests=40)
    rows = list(compare("chat", ["lru", "cost"], [6, 12], size=size, options=Options(host_gb=8)))
    assert [(r["budget_gb"], r["policy"]) for r in rows] == [
        (6, "lru"), (6, "cost"), (12, "lru"), (12, "cost")
    ]  # fmt: skip
    for row in rows:
        assert row["ratio"] == row["cost_seconds"] / row["optimum_seconds"] >= 1 - 1e-9
        assert row["cost_seconds"] >= row["compulsory_seconds"] - 1e-9 > 0
        assert row["requests"] == 40


def test_a_wrong_policy_is_found_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="wanted one of cost, elora, lru; got 'mru'"):
        next(compare("chat", ["lru", "mru"], [6]))
