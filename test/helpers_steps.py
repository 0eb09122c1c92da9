"""Requests and servers of a few bytes, to be played by `sim.steps`."""

from dataclasses import replace

from helpers_sim import OPTIONS, tiny

from sglang_graft.cache import Rates
from sglang_graft.sim.compare import Bench
from sglang_graft.sim.replay import Replay
from sglang_graft.sim.schedule import Schedule, Server
from sglang_graft.sim.steps import Served, Steps, serve
from sglang_graft.sim.workloads import Request, Segment

# Binary fractions: sums are exact, in whatever order they are made.
TOKEN_S = 0.25
RATES = Rates(
    h2d_bytes_per_s=2.0**60,
    disk_bytes_per_s=2.0**60,
    prefill_s_per_token=TOKEN_S,
    prefill_s_per_token_pair=0,
)
# The KV of a token (4 bytes) takes 1/16 s to read.
STEPS = Steps(prefill_s=1.0, decode_s=0.5, decode_s_per_request=0.125, read_bytes_per_s=64.0)


def request(at: float, key: int, prompt: int, output: int, adapter: int = 0) -> Request:
    """One whose tokens nobody shares."""
    made = Segment(10_000 + key, output, generated=True)
    return Request(adapter, (Segment(key, prompt),), made, arrival_s=at)


def prepared(
    requests: list[Request],
    *,
    pages: int = 1000,
    rates: Rates = RATES,
    host_gb: float = 0.0,
    **server: int,
) -> Replay:
    options = replace(OPTIONS, rates=rates, host_gb=host_gb)
    gpu = Server(pages=pages, rates=rates, **server)
    return Bench(tiny(requests), gpu, Schedule(), options).prepared("lru")


def played(
    requests: list[Request],
    steps: Steps = STEPS,
    *,
    pages: int = 1000,
    rates: Rates = RATES,
    **server: int,
) -> Served:
    return serve(prepared(requests, pages=pages, rates=rates, **server), steps)
