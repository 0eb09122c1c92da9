"""What a soak counts as a problem, and the figures of its quarters."""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from sglang_graft.bench import soak
from sglang_graft.bench.play import UNFINISHED, Record

OWNERS = ["chat", "chat", "agents"]


def record(due: float, *, adapter: int = 0, wait: float = 0.5, error: str = "") -> Record:
    """Has its first token after `wait` seconds and another each 0.1 s, unless it failed."""
    made = Record(0, adapter, 10, 3, due, due, error=error, waited_s=wait)
    if error:
        made.end_s = due + wait
        return made
    made.ttft_s, made.gaps_s, made.tokens = wait, [0.1, 0.1], 3
    made.end_s = due + wait + 0.2
    return made


def test_only_what_the_end_cut_is_no_problem() -> None:
    records = [record(1), record(2, error=UNFINISHED), record(3, adapter=2, error="status 500: x")]
    counts, problems = soak.errors(records, OWNERS)
    assert counts == {"completed": 1, "unfinished": 1, "failed": 1}
    assert problems == ["agents, sent at 3.0 s: status 500: x"]


def test_quarters_have_their_own_times() -> None:
    early = [record(1 + i, wait=0.5) for i in range(5)]
    late = [record(31 + i, wait=2.0) for i in range(6)]
    first, second, third, last = soak.quarters([*early, *late], 40.0)
    assert first["ttft_ms"] == {"mean": pytest.approx(500), "p50": pytest.approx(500)}
    assert last["ttft_ms"] == {"mean": pytest.approx(2000), "p50": pytest.approx(2000)}
    assert first["tpot_ms"]["mean"] == pytest.approx(100)
    assert (first["requests"], last["requests"]) == (5, 6)
    assert (first["completed_per_s"], last["completed_per_s"]) == (0.5, 0.6)
    for empty in (second, third):
        assert (empty["requests"], empty["ttft_ms"], empty["tpot_ms"]) == (0, None, None)


def test_a_request_counts_where_it_was_due_and_where_it_ended() -> None:
    rows = soak.quarters([record(9.9)], 40.0)  # it ends at 10.6
    assert [row["requests"] for row in rows] == [1, 0, 0, 0]
    assert [row["completed_per_s"] for row in rows] == [0, 0.1, 0, 0]
    # One that ends a little after the end belongs to the last quarter.
    assert soak.quarters([record(39.9)], 40.0)[-1]["completed_per_s"] == 0.1


def test_requests_without_a_token_count_as_long_as_they_waited() -> None:
    cut = [record(1, wait=8.0, error=UNFINISHED) for _ in range(5)]
    first = soak.quarters(cut, 40.0)[0]
    assert first["ttft_ms"]["mean"] == pytest.approx(8000)
    assert (first["tpot_ms"], first["completed_per_s"]) == (None, 0)


def test_drift_is_of_all_and_of_each_workload() -> None:
    records = [record(1, adapter=0), record(2, adapter=1), record(3, adapter=2)]
    found = soak.drift(records, OWNERS, 40.0)
    assert {name: rows[0]["requests"] for name, rows in found.items()} == {
        "all": 3,
        "agents": 1,
        "chat": 2,
    }
    assert found["all"][0]["ttft_ms"] is None  # too few


def test_growth_leaves_the_first_quarter_out() -> None:
    mib = 2**20
    sizes = [1, 1, 100, 100, 150, 150, 103, 103]  # two samples a quarter
    rows = [(float(5 * i), {"scheduler": size * mib}) for i, size in enumerate(sizes)]
    rows[1][1]["gpu"] = 7 * mib
    found = soak.growth(rows, 40.0)
    assert found["scheduler"] == {"warm_mib": 100.0, "end_mib": 103.0, "ratio": 1.03}
    assert found["gpu"] is None
    names = ("scheduler", "gpu", "absent")
    assert len(list(soak.grown(found, names, soak.LONG_ENOUGH_S))) == 1
    assert not list(soak.grown(found, names, soak.LONG_ENOUGH_S - 1))
    flat: dict[str, Any] = {"scheduler": {"warm_mib": 1, "end_mib": 1, "ratio": soak.FLAT}}
    assert not list(soak.grown(flat, names, soak.LONG_ENOUGH_S))


def pool() -> dict[str, Any]:
    """After a flush: one adapter whose image lies in host memory."""
    pages = {"total": 10, "free": 10, "adapter": 0, "kv_cached": 0, "kv_running": 0, "in_flight": 0}
    return {
        "pages": pages,
        "invalid_kv_pages": 0,
        "host": {"pages": {"kv_cached": 0}},
        "adapter_host_bytes": 100,
        "base": {"locks": 0},
        "adapters": [{"name": "one", "locks": 0, "host_pages": 2}],
        "retired": [],
    }


def requests() -> dict[str, Any]:
    return {"total": 0, "adapters": {"one": 0}, "retired": []}


def test_a_pool_must_add_up() -> None:
    assert not list(soak.pool_problems(pool()))
    lost = pool()
    lost["pages"]["free"] = 9
    assert "add up" in next(soak.pool_problems(lost))
    invalid = pool() | {"invalid_kv_pages": 3}
    assert "3 pages" in next(soak.pool_problems(invalid))


LEFT: list[tuple[str, dict[str, Any], str]] = [
    ("pool", {"pages": pool()["pages"] | {"kv_cached": 1, "free": 9}}, "^pages: "),
    ("pool", {"host": {"pages": {"kv_cached": 4}}}, "^host pages of KV: 0 .* 4 "),
    ("pool", {"adapters": pool()["adapters"] + [{"name": "x", "locks": 0}]}, "^adapters: "),
    ("pool", {"retired": [{"name": "x"}]}, "^retired adapters: "),
    ("pool", {"base": {"locks": 1}}, "^the base model is locked 1 times"),
    ("pool", {"adapters": [{"name": "one", "locks": 2}]}, "^one is locked 2 times"),
    ("pool", {"adapter_host_bytes": 101}, "^host bytes of adapters: 100 .* 101 "),
    ("requests", {"total": 1}, "^requests: 0 .* 1 "),
    ("requests", {"adapters": {"one": 1}}, "^one has 1 requests"),
    ("requests", {"retired": [{"id": "x"}]}, "^retired registrations: "),
]


def test_nothing_is_left() -> None:
    assert not list(soak.left_over(pool(), pool(), requests()))
    # Images that host memory had no room for at the start may lie in it at the end.
    start = copy.deepcopy(pool())
    start["adapters"][0]["host_pages"] = 0
    assert not list(soak.left_over(start, pool() | {"adapter_host_bytes": 101}, requests()))


@pytest.mark.parametrize(("of", "change", "text"), LEFT, ids=[text for _, _, text in LEFT])
def test_what_is_left_is_named(of: str, change: dict[str, Any], text: str) -> None:
    after = {"pool": pool(), "requests": requests()}
    after[of] |= change
    (found,) = soak.left_over(pool(), after["pool"], after["requests"])
    assert re.match(text, found)


def test_tracebacks_are_found_by_their_exception() -> None:
    log = (
        "[10:00] started\n"
        "[10:01] it failed: Traceback (most recent call last):\n"
        '  File "a.py", line 1, in f\n    g()\n\n    ^^^\n'
        "AssertionError: 3 pages\n"
        "[10:02] Traceback (most recent call last):\n"
        '  File "b.py", line 1\n'
        "KeyError: 'x'\n"
        "[10:03] ended\n"
    )
    assert soak.tracebacks(log) == ["AssertionError: 3 pages", "KeyError: 'x'"]
    assert soak.tracebacks("[10:00] started\n") == []


def row(name: str, ids: list[int], best: list[list[float]], length: int = 5) -> dict[str, Any]:
    return {"name": name, "length": length, "ids": ids, "best": best}


CLEAR, TIE, OTHER_TIE = [[-0.1, -3.0]], [[-0.5, -0.6]], [[-0.9, -1.0]]


def test_log_probabilities_are_compared_until_the_answers_part() -> None:
    one = row("a", [1, 2, 3], [[-0.1, -1.0], [-0.5, -0.6], [-1.0, -1.1]])
    other = row("a", [1, 9, 9], [[-0.2, -1.0], [-0.7, -0.9], [-9.0, -9.0]])
    found = soak.agreement([one], [other], "bfloat16")
    assert found["largest_logprob_difference"] == pytest.approx(0.2)
    assert found["agree"]
    assert not soak.agreement([one], [other], "float32")["agree"]


def test_a_tie_of_other_likelihood_is_another_answer() -> None:
    assert soak.agreement([row("a", [1], TIE)], [row("a", [2], TIE)], "bfloat16")["agree"]
    found = soak.agreement([row("a", [1], TIE)], [row("a", [2], OTHER_TIE)], "bfloat16")
    assert found["largest_gap_where_they_part"] == pytest.approx(0.1)
    assert not found["agree"]
    # Nor do equal tokens make it the same.
    assert not soak.agreement([row("a", [1], TIE)], [row("a", [1], OTHER_TIE)], "bfloat16")["agree"]


def test_what_canaries_can_see_is_known() -> None:
    near = [[-0.4, -0.6]]
    rows = [row("a", [1], near), row("b", [2], TIE), row("c", [3], OTHER_TIE)]
    rows.append(row("d", [9], CLEAR, length=6))
    # a and b would be taken for each other, c for none; d had another prompt.
    assert soak.other_weights_found(rows, "bfloat16") == pytest.approx(4 / 6)
    assert soak.other_weights_found(rows[:1], "bfloat16") == 0


SERVER = """
import subprocess, sys
child = "import setproctitle, time; setproctitle.setproctitle('sglang::scheduler'); print('up', "\
    "flush=True); time.sleep(600)"
subprocess.run([sys.executable, "-c", child])
"""


@pytest.fixture
def server() -> Iterator[int]:
    """A process with a child that has the name of SGLang's scheduler."""
    line = [sys.executable, "-c", SERVER]
    with subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process.pid
        os.killpg(process.pid, 9)


def test_resident_memory_of_a_server(server: int) -> None:
    found = soak.resident(server)
    assert set(found) == {"http", "scheduler", "tree"}
    assert found["tree"] == found["http"] + found["scheduler"]
    assert all(size > 2**20 for size in found.values())


def test_a_server_that_has_ended_has_no_memory() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            pass
        with pytest.raises(psutil.NoSuchProcess):
            soak.resident(process.pid)
    finally:
        process.wait()
