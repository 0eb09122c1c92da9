"""Fixed seeds decide the same for ever: what leaves, in which order, and what a run costs.

Faster code must not decide otherwise. `python test/unit/sim/test_decisions.py` writes the record
anew; do that only where another decision is meant.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_graft.cache.departures import Departures, Reason
from sglang_graft.sim.compare import Options, bench
from sglang_graft.sim.replay import Replay
from sglang_graft.sim.trace import Trace
from sglang_graft.sim.workloads import GENERATORS, Size, generate

RECORD = Path(__file__).with_name("decisions.json")
POLICIES = ("cost", "elora", "lru")
# A host without, and one with, room for everything; and one in which copies displace each other.
HOSTS = (0.0, 3.0, 64.0)


class _Hashed(Departures):
    """Every departure from the device, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.digest = hashlib.sha256()

    def note(
        self,
        clock: int,
        reason: Reason,
        identity: str | None,
        pages: int,
        *,
        weights: bool,
        kept: bool,
    ) -> None:
        if pages:
            self.digest.update(repr((clock, reason.value, identity, pages, weights, kept)).encode())
        super().note(clock, reason, identity, pages, weights=weights, kept=kept)


def decisions(workload: str, policy: str, host_gb: float) -> dict[str, Any]:
    """A short run: its departures as a hash, and everything that it counts."""
    options = Options(host_gb=host_gb, optimum=False)
    size = Size(requests=160, adapters=24)
    ready = bench(Trace(generate(workload, seed=7, size=size), options.sizes), 5.0, options)
    run = Replay(ready.trace, ready.plan, ready.server, ready.policy(policy), ready.host_pages)
    departures = _Hashed()
    run.tree.departures = departures
    totals = run.run()
    return {
        "departures": departures.digest.hexdigest(),
        "device_tokens": totals.device_tokens,
        "host_tokens": totals.host_tokens,
        "adapter_loads": totals.adapter_loads,
        "disk_reads": totals.disk_reads,
        "stored_bytes": totals.stored_bytes,
        "cost_seconds": totals.cost_seconds,
        "ttft_s": sum(run.ttft_s),
    }


def key(workload: str, policy: str, host_gb: float) -> str:
    return f"{workload}, {policy}, host {host_gb:g} GB"


@pytest.fixture(scope="module")
def record() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("host_gb", HOSTS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workload", sorted(GENERATORS))
def test_decisions_are_those_of_the_record(
    record: dict[str, dict[str, Any]], workload: str, policy: str, host_gb: float
) -> None:
    found = decisions(workload, policy, host_gb)
    wanted = record[key(workload, policy, host_gb)]
    seconds = [name for name in wanted if name.endswith(("_seconds", "_s"))]
    assert {name: found.pop(name) for name in seconds} == pytest.approx(
        {name: wanted.pop(name) for name in seconds}, rel=1e-12
    )
    assert found == wanted


def main() -> None:
    found = {
        key(workload, policy, host): decisions(workload, policy, host)
        for workload in sorted(GENERATORS)
        for policy in POLICIES
        for host in HOSTS
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in found.items())
    RECORD.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
