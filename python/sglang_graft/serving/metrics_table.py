"""Every metric of `/metrics`: name, labels, meaning, and where its value is in a snapshot.

`docs/metrics.md` is made from this table. Names follow Prometheus: base units, `_total` on
counters. A counter that the scheduler reports in `host` needs one row here and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sglang_graft.cache import Reason

Snapshot = dict[str, Any]
Sample = tuple[tuple[str, ...], Any]
"""Label values, and a number (or a histogram's report, or count and sum)."""
Reader = Callable[[Snapshot], Iterable[Sample]]


class Kind(Enum):
    """What Prometheus may do with a metric."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


class Source(Enum):
    """Which part of a snapshot a metric is read from."""

    SCHEDULER = "scheduler"
    HTTP = "http"


@dataclass(frozen=True)
class Metric:
    """One row. `labels` are names with what their values mean."""

    name: str
    kind: Kind
    help: str
    read: Reader
    labels: tuple[tuple[str, str], ...] = ()
    source: Source = Source.SCHEDULER


def value(*path: str) -> Reader:
    """The number at `path`."""

    def read(snapshot: Snapshot) -> Iterator[Sample]:
        found: Any = snapshot
        for key in path:
            found = found[key]
        yield (), found

    return read


def keys(*path: str, of: dict[str, str]) -> Reader:
    """A sample for each label value of `of`, whose entry names the key below `path`."""

    def read(snapshot: Snapshot) -> Iterator[Sample]:
        found: Any = snapshot
        for key in path:
            found = found[key]
        for label, key in of.items():
            yield (label,), found[key]

    return read


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _host_total(name: str, field: str, meaning: str) -> Metric:
    """A counter of `docs/tiers.md`."""
    return Metric(name, Kind.COUNTER, meaning, value("host", field))


def _moved_bytes(snapshot: Snapshot) -> Iterator[Sample]:
    for direction in ("to_device", "to_host"):
        yield (direction,), snapshot["host"][f"pages_{direction}"] * snapshot["page_bytes"]


def _evictions(field: str) -> Reader:
    """Every reason, also those that never asked: a series that is not there cannot be summed."""

    def read(snapshot: Snapshot) -> Iterator[Sample]:
        found = {(row["reason"], row["what"]): row[field] for row in snapshot["evictions"]}
        for reason in Reason:
            for what in ("adapter", "kv"):
                yield (reason.value, what), found.get((reason.value, what), 0)

    return read


def _count_and_sum(count: str, total: str) -> Reader:
    def read(snapshot: Snapshot) -> Iterator[Sample]:
        yield (), (snapshot[count], snapshot[total])

    return read


def _by_adapter(field: str) -> Reader:
    def read(snapshot: Snapshot) -> Iterator[Sample]:
        for label, found in snapshot[field].items():
            yield (label,), found

    return read


def _errors(snapshot: Snapshot) -> Iterator[Sample]:
    yield from snapshot["errors"].items()


def _info(snapshot: Snapshot) -> Iterator[Sample]:
    yield (snapshot["version"], snapshot["sglang_version"], snapshot["policy"]), 1


OWNER = (("owner", "`free`, `adapter` (weights), `kv_cached`, `kv_running`, `in_flight`"),)
HOST_OWNER = (("owner", "`free`, `adapter` (images), `kv_cached`, `in_flight`"),)
TIER = (("tier", "`device`, `loading` (on its way there), `host`, `disk`"),)
FOUND_ADAPTER = (("found", "`device`, `host`, `disk`"),)
FOUND_KV = (("found", "`device`, `host`, `nowhere` (computed)"),)
DIRECTION = (("direction", "`to_device`, `to_host`"),)
EVICTED = (
    ("reason", "what asked for the room: " + ", ".join(f"`{reason.value}`" for reason in Reason)),
    ("what", "what left: `adapter` (weights), `kv`"),
)
ADAPTER = (("adapter", "a name, `(base)`, `(other)` or `(unknown)`; see above"),)
ERROR = (
    *ADAPTER,
    (
        "reason",
        "`bad_request`, `not_found`, `too_many_requests`, `unavailable`, `internal`, `cancelled`"
        " (the client left), `aborted`",
    ),
)

_POOL = (
    Metric(
        "graft_pool_pages",
        Kind.GAUGE,
        "Pages of the device pool by owner; they add up to all of it.",
        keys("pages", of=_same("free", "adapter", "kv_cached", "kv_running", "in_flight")),
        OWNER,
    ),
    Metric("graft_pool_page_bytes", Kind.GAUGE, "Size of a page.", value("page_bytes")),
    Metric("graft_pool_page_tokens", Kind.GAUGE, "Tokens of KV in a page.", value("page_tokens")),
    Metric(
        "graft_pool_protected_pages",
        Kind.GAUGE,
        "Pages of weights and cached KV that requests or pins hold.",
        value("protected_pages"),
    ),
    Metric(
        "graft_pool_reserve_pages",
        Kind.GAUGE,
        "Pages promised to running requests.",
        value("reserve_pages"),
    ),
    Metric(
        "graft_invalid_kv_pages",
        Kind.GAUGE,
        "KV on the device whose adapter is not there: 0 by construction.",
        value("invalid_kv_pages"),
    ),
    Metric(
        "graft_host_pool_pages",
        Kind.GAUGE,
        "Pages of the host pool by owner.",
        keys("host", "pages", of=_same("free", "adapter", "kv_cached", "in_flight")),
        HOST_OWNER,
    ),
    Metric(
        "graft_adapters",
        Kind.GAUGE,
        "Adapters by where their weights are; names with equal weights count once.",
        keys("adapters", of=_same("device", "loading", "host", "disk")),
        TIER,
    ),
    Metric("graft_adapter_names", Kind.GAUGE, "Names that lead to an adapter.", value("names")),
    Metric("graft_adapters_pinned", Kind.GAUGE, "Adapters that are pinned.", value("pinned")),
    Metric(
        "graft_adapters_retired",
        Kind.GAUGE,
        "Unloaded or replaced adapters that wait for their last request.",
        value("retired"),
    ),
)

_MOVES = (
    _host_total("graft_adapter_loads_total", "loads", "Adapters copied from host to device."),
    _host_total(
        "graft_adapter_disk_reads_total", "disk_reads", "Images of adapters read again from disk."
    ),
    _host_total(
        "graft_adapter_read_failures_total", "failed_reads", "Reads of images that failed."
    ),
    Metric(
        "graft_adapter_load_seconds",
        Kind.HISTOGRAM,
        "From the start of an adapter's copy to the device to the pass that saw it landed.",
        value("load_seconds"),
    ),
    Metric(
        "graft_evictions_total",
        Kind.COUNTER,
        "Adapters, and runs of KV, that left the device.",
        _evictions("nodes"),
        EVICTED,
    ),
    Metric(
        "graft_evicted_pages_total",
        Kind.COUNTER,
        "Pages of adapters and KV that left the device.",
        _evictions("pages"),
        EVICTED,
    ),
    _host_total(
        "graft_kv_promotions_total", "promotions", "Runs of KV copied from host to device."
    ),
    _host_total(
        "graft_write_backs_total",
        "write_backs",
        "Runs of KV, or adapters, copied from device to host.",
    ),
    _host_total(
        "graft_kv_demoted_pages_total",
        "kv_pages_demoted",
        "Pages of KV that left the device for the host.",
    ),
    _host_total("graft_kv_dropped_pages_total", "kv_pages_dropped", "Pages of KV that were lost."),
    _host_total(
        "graft_thrash_total",
        "thrash",
        "Adapters and runs of KV loaded again soon after they had left.",
    ),
    Metric(
        "graft_moved_bytes_total",
        Kind.COUNTER,
        "Bytes of weights and KV copied between device and host.",
        _moved_bytes,
        DIRECTION,
    ),
    Metric(
        "graft_moving_pages",
        Kind.GAUGE,
        "Pages of copies that have not landed.",
        keys("host", of={"to_device": "pages_loading", "to_host": "pages_storing"}),
        DIRECTION,
    ),
)

_REQUESTS_IN_SCHEDULER = (
    Metric(
        "graft_adapter_lookups_total",
        Kind.COUNTER,
        "Requests by where their adapter was when they came.",
        keys("host", of={tier: f"hits_{tier}" for tier in ("device", "host", "disk")}),
        FOUND_ADAPTER,
    ),
    Metric(
        "graft_prompt_tokens_total",
        Kind.COUNTER,
        "Tokens of prompts by where their KV was when the request came.",
        keys(
            "host",
            of={
                "device": "tokens_device",
                "host": "tokens_host",
                "nowhere": "tokens_computed",
            },
        ),
        FOUND_KV,
    ),
    Metric(
        "graft_adapter_wait_seconds",
        Kind.HISTOGRAM,
        "Of requests with an adapter: how long they were passed over because bytes were missing.",
        value("wait_seconds"),
    ),
    Metric(
        "graft_requests_held_back",
        Kind.GAUGE,
        "Waiting requests that were passed over because bytes are missing.",
        value("held_back"),
    ),
    _host_total(
        "graft_passes_waited_total",
        "passes_waited",
        "Scheduling passes in which a request was passed over, each request counted.",
    ),
    Metric(
        "graft_scheduler_pass_seconds",
        Kind.SUMMARY,
        "Turns of the scheduler's loop while requests ran or waited.",
        _count_and_sum("passes", "pass_seconds"),
    ),
    Metric(
        "graft_scheduler_answer_seconds",
        Kind.SUMMARY,
        "What the scheduler spent on the questions of /metrics and of the page, this one excluded.",
        _count_and_sum("answers", "answer_seconds"),
    ),
)

_HTTP = (
    Metric(
        "graft_requests_total",
        Kind.COUNTER,
        "Requests that ended, whatever their end.",
        _by_adapter("requests"),
        ADAPTER,
        Source.HTTP,
    ),
    Metric(
        "graft_request_errors_total",
        Kind.COUNTER,
        "Requests that ended without their answer.",
        _errors,
        ERROR,
        Source.HTTP,
    ),
    Metric(
        "graft_time_to_first_token_seconds",
        Kind.HISTOGRAM,
        "From the arrival of a request to its first token, of requests that were answered.",
        _by_adapter("ttft"),
        ADAPTER,
        Source.HTTP,
    ),
    Metric(
        "graft_requests_in_flight",
        Kind.GAUGE,
        "Requests between arrival and end.",
        value("in_flight"),
        source=Source.HTTP,
    ),
    Metric(
        "graft_scheduler_stale",
        Kind.GAUGE,
        "1 when the scheduler did not answer in time: its metrics here are older ones, or none.",
        value("stale"),
        source=Source.HTTP,
    ),
    Metric(
        "graft_scheduler_snapshot_age_seconds",
        Kind.GAUGE,
        "Age of the scheduler's metrics here; since the server's start when it never answered.",
        value("age"),
        source=Source.HTTP,
    ),
    Metric(
        "graft_info",
        Kind.GAUGE,
        "1; its labels tell what runs.",
        _info,
        (
            ("version", "of Graft"),
            ("sglang_version", "of SGLang"),
            ("policy", "`--graft-policy`"),
        ),
        Source.HTTP,
    ),
)

METRICS: tuple[Metric, ...] = (*_POOL, *_MOVES, *_REQUESTS_IN_SCHEDULER, *_HTTP)


def document() -> Iterator[str]:
    """The rows of `docs/metrics.md`."""
    yield "| metric | type | labels | meaning |"
    yield "|---|---|---|---|"
    for metric in METRICS:
        labels = "; ".join(f"`{name}`: {meaning}" for name, meaning in metric.labels)
        yield f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |"
