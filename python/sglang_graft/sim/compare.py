"""Policies side by side on one workload: one row of plain numbers for each policy and budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_graft.cache import Cost, EvictionPolicy, Prices, Rates, make_policy, policy_names
from sglang_graft.sim.optimum import lower_bound, uses
from sglang_graft.sim.replay import Replay, summary
from sglang_graft.sim.schedule import Schedule, Server, schedule
from sglang_graft.sim.sizes import Sizes
from sglang_graft.sim.trace import Trace
from sglang_graft.sim.workloads import Size, generate

DEFAULT_BUDGETS = (6.0, 12.0, 24.0)
DEFAULT_HOST_GB = 64.0
NO_COUNTS = "cost-no-counts"
"""The cost model without its memory of reuse, for comparison; the server does not offer it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How to replay; `host_gb` 0 is no host tier."""

    host_gb: float = DEFAULT_HOST_GB
    prefetch: bool = True
    dependency_rule: bool = True
    idle_promotion: bool = False
    optimum: bool = True
    check: bool = False
    sizes: Sizes = field(default_factory=Sizes)
    rates: Rates = field(default_factory=Rates)
    decode_s_per_token: float = 0.012


@dataclass(slots=True)
class Bench:
    """One trace on one budget, ready for any policy."""

    trace: Trace
    server: Server
    plan: Schedule
    options: Options

    @property
    def host_pages(self) -> int:
        """Pages of the host tier."""
        return self.options.sizes.pages(self.options.host_gb)

    def policy(self, name: str) -> EvictionPolicy:
        """A fresh policy that knows this server's prices."""
        sizes, rates = self.options.sizes, self.options.rates
        prices = Prices(
            page_bytes=sizes.page_bytes,
            page_tokens=sizes.page_tokens,
            host_tier=self.host_pages > 0,
            rates=rates,
        )
        if name == NO_COUNTS:
            return Cost(prices, most_uses=1.0)
        return make_policy(name, prices)

    def replay(self, name: str) -> Replay:
        """A finished run of the policy called `name`."""
        run = self.prepared(name)
        run.run()
        return run

    def prepared(self, name: str) -> Replay:
        """One that has seen nothing yet."""
        return Replay(
            self.trace,
            self.plan,
            self.server,
            self.policy(name),
            self.host_pages,
            prefetch=self.options.prefetch,
            dependency_rule=self.options.dependency_rule,
            idle_promotion=self.options.idle_promotion,
            check=self.options.check,
        )

    def optimum(self) -> float:
        """The lower bound of this trace on this budget, in seconds."""
        return lower_bound(self.trace, self.plan, self.server, host_pages=self.host_pages)


def bench(trace: Trace, budget_gb: float, options: Options) -> Bench:
    """The trace on a device with `budget_gb` (1e9 bytes) for weights and KV.

    ValueError when a request does not fit.
    """
    server = Server(
        pages=trace.sizes.pages(budget_gb),
        rates=options.rates,
        decode_s_per_token=options.decode_s_per_token,
    )
    return Bench(trace, server, schedule(trace, server), options)


def compare(
    workload: str,
    policies: Sequence[str],
    budgets_gb: Sequence[float],
    *,
    seed: int = 0,
    size: Size | None = None,
    options: Options | None = None,
) -> Iterator[dict[str, Any]]:
    """One row for each budget and policy; `optimum_seconds` is None where it was not asked for."""
    options = options or Options()
    for name in policies:
        check_policy(name)  # a wrong name shall not wait for the first replay to be found
    trace = Trace(generate(workload, seed=seed, size=size), options.sizes)
    for budget in budgets_gb:
        ready = bench(trace, budget, options)
        best = ready.optimum() if options.optimum else None
        first = uses(trace, ready.plan, options.rates).compulsory_s
        for name in policies:
            run = ready.replay(name)
            cost = run.totals.cost_seconds
            yield {
                "workload": workload,
                "policy": name,
                "budget_gb": budget,
                "cost_seconds": cost,
                "optimum_seconds": best,
                "ratio": None if best is None else cost / best,
                "compulsory_seconds": first,
                "host_gb": options.host_gb,
                "seed": seed,
                "dependency_rule": options.dependency_rule,
                "prefetch": options.prefetch,
                "idle_promotion": options.idle_promotion,
                "adapters": len(trace.workload.adapters),
                "held_share": max(ready.plan.held) / ready.server.pages,
                **summary(run.totals, run.ttft_s),
            }


def chosen_policies(text: str) -> list[str]:
    """Names from `all` or a list with commas; ValueError names the known ones."""
    names = policy_names() if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        check_policy(name)
    return names


def check_policy(name: str) -> None:
    """ValueError unless `name` is a policy of the server or of the replay alone."""
    if name != NO_COUNTS:
        make_policy(name)
