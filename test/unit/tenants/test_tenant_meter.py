"""Rates on a clock that the test moves."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_graft.tenants import Bucket, Meter, Tenant, make_key
from sglang_graft.tenants.bucket import retry_after


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def tenant(**fields: float) -> Tenant:
    return Tenant(keys=(make_key()[1],), **fields)  # type: ignore[arg-type]


def test_requests_come_at_their_rate_after_the_burst() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.configure({"a": tenant(requests_per_second=2.0, burst_seconds=2.0)})
    assert [meter.admit("a") for _ in range(4)] == [0, 0, 0, 0]
    assert meter.admit("a") == 0.5
    assert meter.refused == {"a": 1}
    clock.now += 0.5
    assert meter.admit("a") == 0
    assert meter.admit("a") > 0
    clock.now += 1000
    assert [meter.admit("a") for _ in range(5)][-1] > 0, "no more than the burst is saved"


def test_tokens_are_paid_afterwards() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.configure({"a": tenant(tokens_per_second=10.0, burst_seconds=1.0)})
    assert meter.admit("a") == 0
    meter.tokens("a", 60)
    assert meter.admit("a") == 5.1
    clock.now += 5.2
    assert meter.admit("a") == 0


def test_a_batch_counts_as_its_prompts() -> None:
    meter = Meter(Clock())
    meter.configure({"a": tenant(requests_per_second=1.0, burst_seconds=4.0)})
    assert meter.admit("a") == 0
    meter.requests("a", 9)
    assert meter.admit("a") == 7


def test_without_limits_nothing_is_counted() -> None:
    meter = Meter(Clock())
    meter.configure({"a": tenant()})
    for name in ("a", "unknown"):
        meter.tokens(name, 10**9)
        assert meter.admit(name) == 0


def test_new_limits_forgive_nothing() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.configure({"a": tenant(tokens_per_second=10.0, burst_seconds=1.0)})
    meter.tokens("a", 110)
    meter.configure({"a": tenant(tokens_per_second=100.0, burst_seconds=1.0)})
    assert meter.admit("a") == 1.01
    meter.configure({"b": tenant()})
    meter.configure({"a": tenant(tokens_per_second=1.0, burst_seconds=1.0)})
    assert meter.admit("a") == 0


@given(
    rate=st.floats(0.01, 1000),
    burst=st.floats(0.1, 60),
    steps=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 500)), max_size=30),
)
def test_nobody_gets_more_than_the_rate_and_one_overdraft(
    rate: float, burst: float, steps: list[tuple[float, int]]
) -> None:
    bucket, now, taken, last = Bucket(rate, burst, 0.0), 0.0, 0, 0
    for pause, units in steps:
        now += pause
        if bucket.wait(now) == 0:
            bucket.take(units, now)
            taken += units
            last = units
    assert taken <= bucket.most + rate * now + last + 1e-6 * (1 + taken)
    assert bucket.left(now - 100) <= bucket.left(now), "a clock that goes back gives nothing"


def test_retry_after_is_whole_seconds() -> None:
    assert [retry_after(s) for s in (0.01, 1.0, 1.2)] == ["1", "1", "2"]
