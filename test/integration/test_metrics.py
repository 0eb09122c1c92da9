"""`/metrics` of a real server: complete, right, there while the scheduler hangs, and what the
dashboard and the alerts ask for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_adapters
import tiny_model
import yaml
from harness import STRICT, Request, Server, serve, wait_until
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse
from promql import TARGET_LABELS, Selector, selectors
from typer.testing import CliRunner

from sglang_graft.cli.app import app
from sglang_graft.serving.metrics_table import METRICS, Kind

pytestmark = pytest.mark.server

DOCS = Path(__file__).parents[2] / "docs"
NAMES = [f"m{number}" for number in range(5)]
PAGE_TOKENS = 16
POOL_PAGES = 80  # three adapters of 24 pages do not fit beside KV
LABELLED = 3
Key = tuple[str, frozenset[tuple[str, str]]]


@pytest.fixture(scope="module")
def server(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("metrics")
    adapters = tiny_adapters.save_ranks(folder, dict.fromkeys(NAMES, 16))
    flags = ["--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(POOL_PAGES * PAGE_TOKENS)]
    flags += ["--enable-metrics", "--graft-metrics-adapters", str(LABELLED)]
    with serve(base_model, folder, *flags, adapters=adapters, env=STRICT) as running:
        yield running


def exposition(server: Server) -> str:
    response = server.get("/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain; version=")
    return response.text


def samples(server: Server) -> dict[Key, float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(exposition(server))
        for sample in family.samples
    }


def value(found: dict[Key, float], name: str, /, **labels: str) -> float:
    return found.get((name, frozenset(labels.items())), 0.0)


def ask(server: Server, name: str | None, seed: int, new: int = 3) -> None:
    server.ask(Request(name, tiny_model.prompt(40, seed), new_tokens=new))


@pytest.fixture(scope="module")
def used(server: Server) -> dict[Key, float]:
    """The metrics after every adapter was used, some KV was promoted, and some requests failed."""
    for turn in range(2):
        for number, name in enumerate([None, *NAMES]):
            ask(server, name, number)
            ask(server, name, 100 * turn + number)
    wrong = {**Request("m0", tiny_model.prompt(8)).body(), "lora_path": "nobody"}
    assert server.post("/generate", wrong).status_code == 404
    body = Request("m1", tiny_model.prompt(8)).body()
    body["sampling_params"] = {"temperature": -1}
    assert server.post("/generate", body).status_code == 400
    server.settle()
    return samples(server)


def test_every_metric_of_the_table_is_there_as_it_says(
    server: Server, used: dict[Key, float]
) -> None:
    families = {family.name: family for family in parse(exposition(server))}
    assert any(name.startswith("sglang:") for name in families), "SGLang's own are beside ours"
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert family.type == metric.kind.value
        assert family.documentation == metric.help
        assert family.samples, metric.name
        labels = {name for name, _ in metric.labels}
        more = {"le"} if metric.kind is Kind.HISTOGRAM else set()
        for sample in family.samples:
            assert set(sample.labels) - more == labels, sample
    ours = {metric.name.removesuffix("_total") for metric in METRICS}
    assert {name for name in families if name.startswith("graft_")} == ours


def test_openmetrics_for_those_who_ask(server: Server, used: dict[Key, float]) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    response = server.client.get(server.url + "/metrics/", headers=accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    ours = response.text.split("# HELP sglang:")[0].removesuffix("# EOF\n") + "# EOF\n"
    assert "graft_pool_pages" in {family.name for family in parse_openmetrics(ours)}


def test_numbers_are_those_of_the_pool(server: Server, used: dict[Key, float]) -> None:
    report = server.pool()
    now = samples(server)
    owners = {"free", "adapter", "kv_cached", "kv_running", "in_flight"}
    for owner in owners:
        assert value(now, "graft_pool_pages", owner=owner) == report["pages"][owner]
    host = report["host"]
    for name, field in (
        ("graft_adapter_loads_total", "loads"),
        ("graft_kv_promotions_total", "promotions"),
        ("graft_kv_demoted_pages_total", "kv_pages_demoted"),
        ("graft_thrash_total", "thrash"),
    ):
        assert value(now, name) == host[field], name
    moved = host["pages_to_device"] * report["page_bytes"]
    assert value(now, "graft_moved_bytes_total", direction="to_device") == moved
    assert value(now, "graft_invalid_kv_pages") == 0
    states = [row["state"] for row in report["adapters"]]
    for tier in ("device", "loading", "host", "disk"):
        assert value(now, "graft_adapters", tier=tier) == states.count(tier)


def test_what_left_and_why_adds_up(server: Server, used: dict[Key, float]) -> None:
    host = server.pool()["host"]
    now = samples(server)
    reasons = ("request", "adapter", "promotion", "pin")

    def left(what: str, name: str) -> float:
        return sum(value(now, name, reason=reason, what=what) for reason in reasons)

    assert left("adapter", "graft_evictions_total") == host["evictions"] > 0
    assert value(now, "graft_evictions_total", reason="adapter", what="adapter") > 0
    gone = host["kv_pages_demoted"] + host["kv_pages_dropped"]
    assert 0 < left("kv", "graft_evicted_pages_total") <= gone


def test_requests_first_tokens_and_errors_by_adapter(used: dict[Key, float]) -> None:
    requests, ttft = "graft_requests_total", "graft_time_to_first_token_seconds_count"
    labelled = NAMES[:LABELLED]
    for name in labelled:
        failed = value(used, "graft_request_errors_total", adapter=name, reason="bad_request")
        assert failed == (name == "m1")
        assert value(used, requests, adapter=name) == 4 + failed
        assert value(used, ttft, adapter=name) == 4
    assert value(used, requests, adapter="(other)") == 4 * (len(NAMES) - LABELLED)
    assert value(used, ttft, adapter="(other)") == 4 * (len(NAMES) - LABELLED)
    assert value(used, requests, adapter="(base)") >= 4, "the server's own warm-up comes on top"
    assert value(used, requests, adapter="(unknown)") == 1
    refused = value(used, "graft_request_errors_total", adapter="(unknown)", reason="not_found")
    assert refused == 1
    names = {dict(labels).get("adapter") for name, labels in used if name == requests}
    assert names == {*labelled, "(other)", "(base)", "(unknown)"}


def test_loads_and_waits_are_measured(used: dict[Key, float]) -> None:
    loads = value(used, "graft_adapter_loads_total")
    assert value(used, "graft_adapter_load_seconds_count") == loads >= len(NAMES)
    assert value(used, "graft_adapter_load_seconds_sum") > 0
    waited = value(used, "graft_adapter_wait_seconds_count")
    assert waited == 4 * len(NAMES), "one for each admitted request with an adapter"
    at_once = value(used, "graft_adapter_wait_seconds_bucket", le="0.001")
    assert at_once == waited, "copies of these adapters are short, so nobody was passed over"
    assert value(used, "graft_passes_waited_total") == 0
    assert value(used, "graft_requests_held_back") == 0
    assert value(used, "graft_scheduler_pass_seconds_count") > 0
    assert value(used, "graft_scheduler_pass_seconds_sum") > 0
    lookups = ("device", "host", "disk")
    found = sum(value(used, "graft_adapter_lookups_total", found=tier) for tier in lookups)
    assert found >= 4 * (len(NAMES) + 1)


def test_a_client_that_leaves_and_an_abort_are_counted(server: Server) -> None:
    before = samples(server)
    body = Request("m0", tiny_model.prompt(30, 4), new_tokens=400).body() | {"stream": True}
    with server.client.stream("POST", server.url + "/generate", json=body) as stream:
        next(stream.iter_lines())
    server.settle()
    now = samples(server)
    requests = "graft_requests_total"
    assert value(now, requests, adapter="m0") == value(before, requests, adapter="m0") + 1
    errors = {
        dict(labels)["reason"]: count
        for (name, labels), count in now.items()
        if name == "graft_request_errors_total" and dict(labels)["adapter"] == "m0"
    }
    assert errors == {"cancelled": 1}
    assert value(now, "graft_requests_in_flight") == 0


def scheduler(server: Server) -> psutil.Process:
    children = psutil.Process(server.pid).children(recursive=True)
    (found,) = [child for child in children if "scheduler" in " ".join(child.cmdline())]
    return found


def test_a_hung_scheduler_leaves_metrics_that_say_so(server: Server) -> None:
    before = samples(server)
    assert value(before, "graft_scheduler_stale") == 0
    process = scheduler(server)
    process.suspend()
    try:
        for _ in range(2):
            hung = samples(server)
            assert value(hung, "graft_scheduler_stale") == 1
            assert value(hung, "graft_scheduler_snapshot_age_seconds") > 0
        for owner in ("free", "adapter"):
            name = "graft_pool_pages"
            assert value(hung, name, owner=owner) == value(before, name, owner=owner)
        answer = server.get("/graft/overview").json()
        assert answer["http"]["stale"] == 1
    finally:
        process.resume()
    wait_until(lambda: value(samples(server), "graft_scheduler_stale") == 0)
    ask(server, "m0", 1)


def check_references(found: list[Selector], known: dict[Key, float]) -> None:
    """Every metric, label and label value that an expression names is in the exposition."""
    for selector in found:
        labels = [dict(labels) for name, labels in known if name == selector.name]
        assert labels, f"no sample of {selector.name}"
        names = set().union(*labels) | TARGET_LABELS
        assert selector.labels <= names, f"{selector.name}: {selector.labels - names}"
        for label, wanted in selector.equal.items():
            assert wanted in {row.get(label) for row in labels}, (
                f"{selector.name}: {label}={wanted}"
            )


def expressions(dashboard: Any) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_what_is_there(used: dict[Key, float]) -> None:
    dashboard = json.loads((DOCS / "grafana/graft.json").read_text())
    found = [selector for text in expressions(dashboard) for selector in selectors(text)]
    assert len(found) > 30
    check_references(found, used)
    variables = [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    for query in variables:
        metric, label = query.removeprefix("label_values(").removesuffix(")").split(", ")
        check_references([Selector(metric, {label})], used)
    used_names = {selector.name for selector in found}
    for metric in METRICS:
        if metric.kind is Kind.COUNTER and metric.name not in ("graft_write_backs_total",):
            shown = any(name == metric.name for name in used_names)
            assert shown or metric.name in UNSHOWN, f"{metric.name} is on no panel"


UNSHOWN = {"graft_evictions_total", "graft_passes_waited_total"}


def test_alerts_ask_for_what_is_there(used: dict[Key, float]) -> None:
    (group,) = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(names) == len(set(names)) > 5
    for rule in group["rules"]:
        check_references(selectors(rule["expr"]), used)
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert {"summary", "action"} <= rule["annotations"].keys()


def test_a_wrong_reference_is_seen(used: dict[Key, float]) -> None:
    for text in (
        "graft_pool_page",
        "sum by (adapter) (graft_pool_pages)",
        'rate(graft_requests_total{name="m0"}[5m])',
        'graft_pool_pages{owner="nobody"}',
    ):
        with pytest.raises(AssertionError):
            check_references(selectors(text), used)


def test_graft_top_shows_the_server(server: Server, used: dict[Key, float]) -> None:
    run = CliRunner()
    result = run.invoke(app, ["top", "--json", "--url", server.url])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    shown = [name for row in answer["scheduler"]["adapters_shown"] for name in row["names"]]
    assert sorted(shown) == NAMES
    assert answer["scheduler"]["departures"]
    result = run.invoke(app, ["top", "--once", "--url", server.url], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    for text in (*NAMES, "(base model)", "cached KV", "left last"):
        assert text in result.stdout
