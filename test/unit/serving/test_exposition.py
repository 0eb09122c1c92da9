"""The metric table: complete, by Prometheus' rules, and rendered so that a parser reads it back."""

import subprocess
import sys
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse

from sglang_graft.cache import Reason
from sglang_graft.serving.exposition import render
from sglang_graft.serving.metrics_table import METRICS, Kind, Source, document
from sglang_graft.tiers import SECONDS, Histogram, TierCounts

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
UNITS = ("_seconds", "_bytes", "_pages", "_tokens", "_total")
COUNTED = ("adapters", "requests", "names", "info", "stale")


def scheduler_part() -> dict[str, Any]:
    """What `engine/view.metrics` sends."""
    waits = Histogram(SECONDS)
    waits.observe(0.3)
    owners = dict.fromkeys(("total", "free", "adapter", "kv_cached", "kv_running", "in_flight"), 4)
    counters = {name: 7 for name in TierCounts.__dataclass_fields__}
    more = ("pages_loading", "pages_storing", "evictions", "kv_pages_demoted", "kv_pages_dropped")
    return {
        "pages": owners,
        "page_bytes": 1000,
        "page_tokens": 16,
        "invalid_kv_pages": 0,
        "protected_pages": 3,
        "reserve_pages": 2,
        "names": 5,
        "retired": 1,
        "pinned": 1,
        "adapters": {"device": 2, "loading": 0, "host": 1, "disk": 1},
        "host": {**counters, **dict.fromkeys(more, 2), "pages": owners},
        "evictions": [{"reason": "request", "what": "kv", "nodes": 3, "pages": 9}],
        "load_seconds": waits.report(),
        "wait_seconds": waits.report(),
        "held_back": 1,
        "passes": 10,
        "pass_seconds": 0.5,
        "answers": 2,
        "answer_seconds": 0.01,
    }


def http_part() -> dict[str, Any]:
    ttft = Histogram(SECONDS)
    ttft.observe(0.02)
    name = 'quo"ted\n\\name'
    return {
        "requests": {"legal": 3, name: 1},
        "errors": {("legal", "bad_request"): 1},
        "ttft": {"legal": ttft.report()},
        "in_flight": 2,
        "stale": 0,
        "age": 0.1,
        "version": "1",
        "sglang_version": "2",
        "policy": "lru",
    }


def rendered(accept: str = "", *, answered: bool = True) -> str:
    scheduler = scheduler_part() if answered else None
    body, kind = render({Source.SCHEDULER: scheduler, Source.HTTP: http_part()}, accept)
    assert kind.startswith("application/openmetrics-text" if accept else "text/plain")
    return body.decode()


def test_names_follow_the_conventions() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith("graft_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.name.endswith(UNITS) or any(word in metric.name for word in COUNTED)
        assert metric.help.endswith("."), metric.name
        assert not {name for name, _ in metric.labels} & {"instance", "job", "le", "quantile"}


def test_every_metric_has_samples_that_a_parser_reads_back() -> None:
    families = {family.name: family for family in parse(rendered())}
    for metric in METRICS:
        family = families.pop(metric.name.removesuffix("_total"))
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        assert family.samples
    assert families == {}
    samples = [sample for family in parse(rendered()) for sample in family.samples]
    assert 'quo"ted\n\\name' in {sample.labels.get("adapter") for sample in samples}


def test_openmetrics_is_as_valid() -> None:
    found = {family.name for family in parse_openmetrics(rendered(OPENMETRICS))}
    assert found == {metric.name.removesuffix("_total") for metric in METRICS}


def test_values() -> None:
    found = {
        (s.name, *sorted(s.labels.items())): s.value for f in parse(rendered()) for s in f.samples
    }
    assert found["graft_pool_pages", ("owner", "free")] == 4
    assert found["graft_moved_bytes_total", ("direction", "to_host")] == 7000
    assert found["graft_scheduler_pass_seconds_count",] == 10
    assert found["graft_scheduler_pass_seconds_sum",] == 0.5
    assert found["graft_adapter_wait_seconds_bucket", ("le", "0.25")] == 0
    assert found["graft_adapter_wait_seconds_bucket", ("le", "0.5")] == 1
    assert found["graft_adapter_wait_seconds_bucket", ("le", "+Inf")] == 1
    evicted = {key: value for key, value in found.items() if key[0] == "graft_evictions_total"}
    assert len(evicted) == 2 * len(Reason), "also those that never happened"
    assert sum(evicted.values()) == 3


def test_a_scheduler_that_never_answered_leaves_the_rest() -> None:
    families = {family.name for family in parse(rendered(answered=False))}
    assert "graft_pool_pages" not in families
    assert {"graft_scheduler_stale", "graft_requests"} <= families


def test_other_collectors_stand_in_the_same_exposition() -> None:
    other = Counter("sglang_things", "Things.", registry=CollectorRegistry())
    body, _ = render({Source.SCHEDULER: None, Source.HTTP: http_part()}, "", [other])
    families = [family.name for family in parse(body.decode())]
    assert {"sglang_things", "graft_info"} <= set(families)
    assert len(families) == len(set(families))


def test_the_document_has_a_row_for_each() -> None:
    rows = list(document())
    assert len(rows) == len(METRICS) + 2
    assert all(row.count(" | ") >= 3 for row in rows[2:])


def test_prometheus_client_is_not_imported_before_sglang_has_chosen_its_folder() -> None:
    code = "import sys, sglang_graft.serving.install; print('prometheus_client' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip().splitlines()[-1] == "False"
