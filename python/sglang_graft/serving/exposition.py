"""The metric table as a Prometheus exposition, beside SGLang's own metrics where those are on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from sglang_graft.serving.metrics_table import METRICS, Kind, Metric, Snapshot, Source

Parts = dict[Source, Snapshot | None]
"""What each source said; None: nothing."""


def _samples(metric: Metric, snapshot: Snapshot) -> Family:
    names = [name for name, _ in metric.labels]
    if metric.kind is Kind.GAUGE:
        gauge = GaugeMetricFamily(metric.name, metric.help, labels=names)
        for labels, number in metric.read(snapshot):
            gauge.add_metric(labels, number)
        return gauge
    if metric.kind is Kind.COUNTER:
        counter = CounterMetricFamily(metric.name, metric.help, labels=names)
        for labels, number in metric.read(snapshot):
            counter.add_metric(labels, number)
        return counter
    if metric.kind is Kind.SUMMARY:
        summary = SummaryMetricFamily(metric.name, metric.help, labels=names)
        for labels, (count, total) in metric.read(snapshot):
            summary.add_metric(labels, count, total)
        return summary
    histogram = HistogramMetricFamily(metric.name, metric.help, labels=names)
    for labels, report in metric.read(snapshot):
        bounds = [*(repr(float(bound)) for bound in report["bounds"]), "+Inf"]
        buckets = list(zip(bounds, accumulate(report["counts"]), strict=True))
        histogram.add_metric(labels, buckets, report["sum"])
    return histogram


class SnapshotCollector(Collector):
    """The families of one snapshot. A source that said nothing has no samples."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Family]:
        """Families in the order of the table."""
        for metric in METRICS:
            snapshot = self._parts[metric.source]
            if snapshot is not None:
                yield _samples(metric, snapshot)


def render(parts: Parts, accept: str, others: Iterable[Any] = ()) -> tuple[bytes, str]:
    """The exposition and its content type, in the format that the client accepts.

    `others` are collectors whose metrics stand in the same exposition.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(parts))
    for other in others:
        registry.register(other)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
