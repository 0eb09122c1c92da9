"""100 replicas and 10^5 adapters: what routing by adapter is worth, simulated.

    python benchmark/serving/fleet.py           # about two minutes on one core
    python benchmark/serving/fleet.py --check   # fails when the file is out of date

Writes results/fleet.json. `sim/fleet.py` says what is modelled; docs/plan.md reads the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_graft.sim.fleet import Fleet, FleetLoad
from sglang_graft.sim.routing import ROUTINGS

RESULTS = Path(__file__).parent / "results/fleet.json"
LOADS = {
    "zipf 1.0": FleetLoad(),
    "zipf 0.8": FleetLoad(exponent=0.8),
}


def simulated() -> Iterator[dict[str, Any]]:
    """A row for each load and routing."""
    for name, load in LOADS.items():
        for routing in ROUTINGS:
            start = time.perf_counter()
            yield {"load_name": name, **Fleet(load, routing).run()}
            took = time.perf_counter() - start
            print(f"{name}, {routing}: {took:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    """Simulate, and write or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = json.dumps(list(simulated()), indent=1) + "\n"
    if options.check:
        raise SystemExit(0 if RESULTS.read_text() == text else f"{RESULTS} is out of date")
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
