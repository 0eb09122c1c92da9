"""Tiny traces: 2 tokens a page, 8 bytes a page, adapters of one page a rank, whole seconds."""

from sglang_graft.cache import Rates
from sglang_graft.sim.compare import Options
from sglang_graft.sim.sizes import Sizes
from sglang_graft.sim.trace import Trace
from sglang_graft.sim.workloads import AdapterSpec, Request, Segment, Workload

SIZES = Sizes(kv_bytes_per_token=4, adapter_bytes_per_rank=8, page_tokens=2)
# A page costs 1 s to copy and 4 s to read; a token 3 s to compute, and 1 s for each one before it.
RATES = Rates(
    h2d_bytes_per_s=8, disk_bytes_per_s=2, prefill_s_per_token=3, prefill_s_per_token_pair=1
)
OPTIONS = Options(sizes=SIZES, rates=RATES, decode_s_per_token=1.0, check=True)


def tiny(requests: list[Request], ranks: tuple[int, ...] = (1, 1)) -> Trace:
    """A trace of hand-made requests."""
    adapters = tuple(AdapterSpec(f"adapter-{i}", rank) for i, rank in enumerate(ranks))
    return Trace(Workload("tiny", 0, adapters, tuple(requests)), SIZES)


def asked(adapter: int, at: float, *keys: int, output: int, length: int = 4) -> Request:
    """A prompt of `length` tokens a key, and 2 tokens out."""
    prompt = tuple(Segment(key, length) for key in keys)
    return Request(adapter, prompt, Segment(output, 2, generated=True), arrival_s=at)
