"""Many replicas: figures by hand on one, and what affinity is worth on a few."""

import pytest

from sglang_graft.cache import Rates
from sglang_graft.sim.fleet import Fleet, FleetLoad, _Bytes
from sglang_graft.sim.sizes import Sizes

SMALL = FleetLoad(
    adapters=600, replicas=6, requests=6000, rate=60.0, device_gb=2.0, host_gb=8.0, seed=1
)


def test_the_least_recently_used_leave_first() -> None:
    held = _Bytes(10)
    assert [held.use(i, 4) for i in (1, 2, 1, 3, 2)] == [False, False, True, False, False]
    assert held.use(3, 4)
    assert not held.use(9, 11)  # larger than everything: it takes nobody's place
    assert held.use(3, 4)


def test_one_request_by_hand() -> None:
    sizes = Sizes(kv_bytes_per_token=4, adapter_bytes_per_rank=8, page_tokens=2)
    rates = Rates(
        h2d_bytes_per_s=8, disk_bytes_per_s=2, prefill_s_per_token=3, prefill_s_per_token_pair=0
    )
    load = FleetLoad(
        adapters=2, replicas=1, requests=1, rate=1.0, system=4, asked=2, warm_share=0.0
    )
    found = Fleet(load, "affinity", sizes, rates).run()
    weights = found["ttft_mean_s"] - 6 * 3  # the whole prompt is computed
    # 8 ranks or 16: read at 2 bytes a second, copied at 8.
    assert weights in (pytest.approx(64 / 2 + 64 / 8), pytest.approx(128 / 2 + 128 / 8))
    assert (found["disk_share"], found["busiest_over_mean"]) == (1.0, 1.0)


def test_shares_add_up_and_a_seed_gives_the_same() -> None:
    found = Fleet(SMALL, "random").run()
    shares = [found[f"{where}_share"] for where in ("device", "host", "disk")]
    assert sum(shares) == pytest.approx(1)
    assert found["requests"] == 3000
    assert Fleet(SMALL, "random").run() == found


def test_affinity_finds_adapters_where_they_are() -> None:
    found = {name: Fleet(SMALL, name).run() for name in ("affinity", "random", "round-robin")}
    assert found["affinity"]["device_share"] > 1.3 * found["random"]["device_share"]
    assert found["affinity"]["disk_share"] < 0.6 * found["random"]["disk_share"]
    assert found["affinity"]["ttft_mean_s"] < found["round-robin"]["ttft_mean_s"]
    assert found["affinity"]["busiest_over_mean"] < 2


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="rate"):
        FleetLoad(rate=0)
