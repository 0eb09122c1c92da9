"""The figures of one unit, from its records and samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_graft.bench.play import UNFINISHED, Record
from sglang_graft.bench.samples import Sample

_QUANTILES = {"p20": 20, "p50": 50, "p80": 80, "p90": 90, "p99": 99}


def spread(values: Sequence[float], scale: float = 1e3) -> dict[str, float] | None:
    """Mean, quantiles and maximum times `scale` (from seconds: milliseconds); None without any."""
    if not len(values):
        return None
    found = np.asarray(values, dtype=np.float64) * scale
    quantiles = {name: float(np.percentile(found, q)) for name, q in _QUANTILES.items()}
    return {"mean": float(found.mean()), **quantiles, "max": float(found.max())}


def first_token_seconds(record: Record) -> float:
    """Time to the first token from when the request was due.

    Of one without any token, how long it had waited: less than its true time, never left out.
    """
    return record.waited_s if record.ttft_s is None else record.ttft_s


def figures(records: Sequence[Record], planned: int) -> dict[str, Any]:
    """What the clients saw. Times in ms, from when a request was due.

    planned: requests of the workload; those that never became due (a session ended early) are
    `not_sent`. ttft covers every request that was sent; `ttft_cut` of them have only a lower bound.
    """
    good = [r for r in records if not r.error]
    wall = max((r.end_s for r in records), default=0.0) - min((r.due_s for r in records), default=0)
    prompt = sum(r.prompt for r in good)
    tokens = sum(r.tokens for r in good)
    per_token = [sum(r.gaps_s) / len(r.gaps_s) for r in good if r.gaps_s]
    unfinished = sum(1 for r in records if r.error == UNFINISHED)
    return {
        "planned": planned,
        "sent": len(records),
        "not_sent": planned - len(records),
        "completed": len(good),
        "errors": len(records) - len(good) - unfinished,
        "unfinished": unfinished,
        "ttft_cut": sum(1 for r in records if r.ttft_s is None),
        "ttft_ms": spread([first_token_seconds(r) for r in records]),
        "tpot_ms": spread(per_token),
        "itl_ms": spread([gap for r in good for gap in r.gaps_s]),
        "e2e_ms": spread([r.end_s - r.due_s for r in good]),
        "client_delay_ms": spread([r.sent_s - r.due_s for r in records]),
        "wall_s": wall,
        "requests_per_s": len(good) / wall if wall else None,
        "output_tokens_per_s": tokens / wall if wall else None,
        "prompt_tokens": prompt,
        "output_tokens": tokens,
        "prefix_hit_rate": sum(r.cached for r in good) / prompt if prompt else None,
    }


def moved(samples: Sequence[Sample]) -> dict[str, Any]:
    """What the server moved between the first and the last sample, and what it held meanwhile."""
    if not samples:
        return {}
    first, last = samples[0], samples[-1]
    invalid = [s.kv_invalid / s.kv_cached for s in samples if s.kv_cached]
    found: dict[str, Any] = {
        name: getattr(last, name) - getattr(first, name)
        for name in ("loads", "evictions", "disk_reads", "bytes_to_device", "bytes_to_host")
        if getattr(last, name) is not None
    }
    if last.passes_waited is not None and first.passes_waited is not None:
        found["passes_waited"] = last.passes_waited - first.passes_waited
    return {
        **found,
        "invalid_kv_share": spread(invalid, 1.0),
        "used_share": spread([s.used / s.budget for s in samples if s.budget], 1.0),
        "samples": len(samples),
        "probe_ms": spread([s.probe_s for s in samples if s.probe_s is not None]),
    }


def columns(records: Sequence[Record]) -> dict[str, list[Any]]:
    """The records as columns, for the file: times in seconds, to a tenth of a millisecond."""
    plain = ("index", "adapter", "prompt", "output", "cached", "tokens", "error")
    found: dict[str, list[Any]] = {name: [getattr(r, name) for r in records] for name in plain}
    for name in ("due_s", "sent_s", "end_s", "ttft_s", "waited_s"):
        values = [getattr(r, name) for r in records]
        found[name] = [None if value is None else round(value, 4) for value in values]
    found["longest_gap_s"] = [round(max(r.gaps_s, default=0.0), 4) for r in records]
    found["tpot_s"] = [
        round(sum(r.gaps_s) / len(r.gaps_s), 5) if r.gaps_s else None for r in records
    ]
    return found
