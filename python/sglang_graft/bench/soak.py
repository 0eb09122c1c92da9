"""What a soak is judged by: errors, what is left at the end, growth of memory, drift of times."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import permutations
from typing import Any

import psutil
import torch

from sglang_graft.bench import gate
from sglang_graft.bench.figures import first_token_seconds, spread
from sglang_graft.bench.play import UNFINISHED, Record

OWNERS = ("free", "adapter", "kv_cached", "kv_running", "in_flight")
QUARTERS = 4
ENOUGH = 5
"""Requests in a quarter below which it has no times."""
FLAT = 1.02
"""Memory that grows by no more than this is flat."""
LONG_ENOUGH_S = 240.0
"""A soak in whose second quarter a server may still warm up says nothing about growth."""

_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(.*)")


def errors(records: Sequence[Record], owners: Sequence[str]) -> tuple[Counter[str], list[str]]:
    """How many requests completed, were cut by the end and failed; and why these did.

    owners: the workload of each adapter.
    """
    counts = Counter({"completed": 0, "unfinished": 0, "failed": 0})
    problems = []
    for record in records:
        if not record.error:
            counts["completed"] += 1
        elif record.error == UNFINISHED:
            counts["unfinished"] += 1
        else:
            counts["failed"] += 1
            owner = owners[record.adapter]
            problems.append(f"{owner}, sent at {record.sent_s:.1f} s: {record.error}")
    return counts, problems


def drift(records: Sequence[Record], owners: Sequence[str], seconds: float) -> dict[str, Any]:
    """`quarters` of all requests, and of each workload."""
    by_owner: dict[str, list[Record]] = {}
    for record in records:
        by_owner.setdefault(owners[record.adapter], []).append(record)
    found = {owner: quarters(own, seconds) for owner, own in sorted(by_owner.items())}
    return {"all": quarters(records, seconds), **found}


def quarters(records: Sequence[Record], seconds: float) -> list[dict[str, Any]]:
    """Requests due in each quarter of `seconds`, mean and P50 of their times in ms (None: fewer
    than ENOUGH), and how many a second were completed in it.

    A request without a token counts in TTFT for as long as it had waited.
    """
    length = seconds / QUARTERS
    due: list[list[Record]] = [[] for _ in range(QUARTERS)]
    completed = [0] * QUARTERS
    for record in records:
        due[_quarter(record.due_s, seconds)].append(record)
        if not record.error:
            completed[_quarter(record.end_s, seconds)] += 1
    return [
        {
            "requests": len(own),
            "completed_per_s": done / length,
            "ttft_ms": _brief([first_token_seconds(r) for r in own]),
            "tpot_ms": _brief(
                [sum(r.gaps_s) / len(r.gaps_s) for r in own if r.gaps_s and not r.error]
            ),
        }
        for own, done in zip(due, completed, strict=True)
    ]


def _quarter(when: float, seconds: float) -> int:
    return min(int(when * QUARTERS / seconds), QUARTERS - 1)


def _brief(values: Sequence[float]) -> dict[str, float] | None:
    found = spread(values) if len(values) >= ENOUGH else None
    return found and {name: found[name] for name in ("mean", "p50")}


def agreement(first: Sequence[gate.Row], rows: Sequence[gate.Row], dtype: str) -> dict[str, Any]:
    """`gate.compare` of answers in the same order, and more strictly: the best log-probability must
    be the same within the tolerance too, as long as both sides have the same tokens before it.

    On a random model many tokens nearly tie, so that a wrong answer may part at a tie. ValueError
    for answers of other lengths.
    """
    differences = [0.0]
    for one, other in zip(first, rows, strict=True):
        for step, (mine, theirs) in enumerate(zip(one["best"], other["best"], strict=True)):
            differences.append(abs(mine[0] - theirs[0]))
            if one["ids"][step] != other["ids"][step]:
                break
    found = gate.compare(first, rows, dtype)
    agree = found["agree"] and max(differences) <= found["tolerance"]
    return found | {"largest_logprob_difference": max(differences), "agree": agree}


def other_weights_found(rows: Sequence[gate.Row], dtype: str) -> float:
    """How much canaries can see: the share of wrong answers (those of other names to the same
    prompt) that `agreement` would find if there were only one."""
    pairs = [
        (one, other | {"name": one["name"]})
        for one, other in permutations(rows, 2)
        if one["length"] == other["length"] and one["name"] != other["name"]
    ]
    found = [not agreement([one], [other], dtype)["agree"] for one, other in pairs]
    return sum(found) / max(len(found), 1)


def resident(pid: int) -> dict[str, int]:
    """Resident bytes of a server: of its scheduler, its HTTP process, and all processes together.

    pid: its HTTP process. psutil.NoSuchProcess when that has ended; a key is missing for what is
    not there.
    """
    root = psutil.Process(pid)
    if root.status() == psutil.STATUS_ZOMBIE:
        raise psutil.NoSuchProcess(pid)
    found: Counter[str] = Counter()
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            size = process.memory_info().rss
            found["tree"] += size
            if process.pid == pid:
                found["http"] += size
            # Direct children only: what it forks has its name until it is another program.
            elif process.name().startswith("sglang::schedul") and process.ppid() == pid:
                found["scheduler"] += size
    return dict(found)


def device_bytes(device: str) -> dict[str, int]:
    """Bytes in use on the first visible GPU, by all processes; nothing on a CPU."""
    if device != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(0)
    return {"gpu": total - free}


Memory = Sequence[tuple[float, Mapping[str, int]]]
"""(seconds since the start, bytes by what holds them)."""


def growth(rows: Memory, seconds: float) -> dict[str, dict[str, float] | None]:
    """Median MiB of the second quarter (the first warms up) and of the last, and their ratio; None
    where one of them has no sample."""
    found: dict[str, dict[str, float] | None] = {}
    for name in sorted({name for _, row in rows for name in row}):
        own: list[list[int]] = [[] for _ in range(QUARTERS)]
        for when, row in rows:
            if name in row:
                own[_quarter(when, seconds)].append(row[name])
        if not own[1] or not own[-1]:
            found[name] = None
            continue
        warm, end = statistics.median(own[1]), statistics.median(own[-1])
        found[name] = {
            "warm_mib": round(warm / 2**20, 1),
            "end_mib": round(end / 2**20, 1),
            "ratio": round(end / warm, 4),
        }
    return found


def grown(
    found: Mapping[str, Mapping[str, float] | None], names: Sequence[str], seconds: float
) -> Iterator[str]:
    """Problems of memory that is not flat, if the soak was long enough to tell."""
    for name in names:
        row = found.get(name)
        if seconds >= LONG_ENOUGH_S and row is not None and row["ratio"] > FLAT:
            yield f"memory of {name} grew: {dict(row)}"


def pool_problems(report: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a report of `/graft/pool`, whatever goes on meanwhile."""
    pages = report["pages"]
    if sum(pages[owner] for owner in OWNERS) != pages["total"]:
        yield f"the pages of the pool do not add up: {pages}"
    if report["invalid_kv_pages"]:
        yield f"{report['invalid_kv_pages']} pages of KV without their adapter"


def left_over(
    start: Mapping[str, Any], end: Mapping[str, Any], requests: Mapping[str, Any]
) -> Iterator[str]:
    """What is left of a soak: reports of `/graft/pool`, both after a flush without any request, and
    of `/graft/requests`."""
    for what, before, after in (
        ("pages", start["pages"], end["pages"]),
        ("host pages of KV", *(report["host"]["pages"]["kv_cached"] for report in (start, end))),
        ("adapters", *(sorted(a["name"] for a in report["adapters"]) for report in (start, end))),
        ("retired adapters", [], [row["name"] for row in end["retired"]]),
        ("requests", 0, requests["total"]),
        ("retired registrations", [], requests["retired"]),
    ):
        if before != after:
            yield f"{what}: {before} at the start, {after} at the end"
    for row in (end["base"], *end["adapters"]):
        if row["locks"]:
            yield f"{row.get('name', 'the base model')} is locked {row['locks']} times at the end"
    for name, count in requests["adapters"].items():
        if count:
            yield f"{name} has {count} requests at the end"
    # When all images lay in host memory at the start, there cannot be more of them.
    everything = all(row["host_pages"] for row in start["adapters"])
    if everything and end["adapter_host_bytes"] > start["adapter_host_bytes"]:
        before, after = (report["adapter_host_bytes"] for report in (start, end))
        yield f"host bytes of adapters: {before} at the start, {after} at the end"


def tracebacks(log: str) -> list[str]:
    """The last line of every traceback in a server's log: the exception."""
    return [match.group(1)[:300] for match in _TRACEBACK.finditer(log)]
