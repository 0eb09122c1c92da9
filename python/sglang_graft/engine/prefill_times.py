"""How long prefill takes here, for the prices of KV.

Target (0.5.17): AROUND `ModelRunner.forward`. Reason: what KV is worth is what computing it again
would take, and only the forward knows. On a GPU events stand around it on its stream and are read
passes later, so nothing waits; on the CPU a forward is over when the call returns.

Only plain prefills count: a forward that also decodes takes longer for the same prompts.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_graft.cache import RateMeter
from sglang_graft.engine.hooks import Hook

Prompts = list[tuple[int, int]]
# Forwards whose events nobody has read yet; more are not measured.
_MOST_PENDING = 64

_meter: list[RateMeter] = []
_pending: deque[tuple[Any, Any, Prompts]] = deque()


def measure_into(meter: RateMeter) -> None:
    """From here on forwards are measured; those of SGLang's own start-up are not."""
    _meter[:] = [meter]


def forward(original: Callable[..., Any], self: Any, forward_batch: Any, **rest: Any) -> Any:
    """AROUND `ModelRunner.forward`."""
    if not _meter or forward_batch.forward_mode != ForwardMode.EXTEND:
        return original(self, forward_batch, **rest)
    lengths, depths = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
    prompts = [(int(n), int(d)) for n, d in zip(lengths, depths, strict=True)]
    if not str(self.device).startswith("cuda"):
        start = time.perf_counter()
        result = original(self, forward_batch, **rest)
        _meter[0].forward(prompts, time.perf_counter() - start)
        return result
    if len(_pending) >= _MOST_PENDING:
        return original(self, forward_batch, **rest)
    before, after = _timed_event(), _timed_event()
    before.record()
    result = original(self, forward_batch, **rest)
    after.record()
    _pending.append((before, after, prompts))
    return result


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def collect() -> None:
    """Read the events of forwards that are over; never waits."""
    while _pending and _pending[0][1].query():
        before, after, prompts = _pending.popleft()
        _meter[0].forward(prompts, before.elapsed_time(after) / 1e3)


HOOKS = (
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.forward",
        kind="around",
        function=forward,
        parameters=(
            "self",
            "forward_batch",
            "skip_attn_backend_init",
            "pp_proxy_tensors",
            "reinit_attn_backend",
            "split_forward_count",
        ),
        reason="measure what computing KV takes",
    ),
)
