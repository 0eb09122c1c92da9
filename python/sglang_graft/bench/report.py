"""The Markdown report: every row, good or bad, measured or missing."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_graft.bench import gate, pairs
from sglang_graft.bench.table import (
    CUT_SHARE,
    DEFAULT_SLOTS,
    GOAL_TTFT_MS,
    Peak,
    Place,
    Row,
    peak,
    places,
    rows,
)
from sglang_graft.bench.units import Results

REMARKS = "remarks.md"
_COLUMNS = (
    *("peer", "rate", "TTFT mean", "P50", "P99", "TPOT mean", "P99", "req/s", "tok/s", "hit"),
    *("loads", "evicted", "to device GB", "to host GB", "invalid KV", "used"),
    *("answered", "to best split", "to default"),
)
_HEAD = """\
Times in ms; TTFT counts from when a request was due. `answered`: of the requests sent, and what
went wrong. `hit`: prompt tokens found in a cache. `to device`: bytes copied from host to device, of
adapters (and of KV where there is a host tier). `invalid KV`: share of cached KV whose adapter was
not on the device, mean over samples. `used`: share of the budget that held something usable, mean.
Several seeds: median (20 % and 80 % quantile over them; of two or three lowest and highest).
`to best split`, `to default`: mean TTFT over that of the best of the static splits tried at this
rate (`of the only one` where it was one), and over stock with {slots} slots; `of base`: where only
the base model is asked, over that of a server without LoRA. These compare the same requests: they
are taken for each seed that both sides have, the best split by the seed, too; of several the
median (lowest-highest) is shown, and how many of the row's seeds they are."""
_LIMITS = """\
Each row is one run, or the median of several seeds where it has ranges, and sides follow one
another; without repeats the tables do not say how much two runs of one side differ. A lower bound
of TTFT is marked with ≥: requests without any token count with the time that they had waited.
Lengths are fixed, and no text is judged."""
# Where Graft may lose against a split -> of its row, how to tell a value.
_LOSSES = (
    ("mean TTFT", pairs.TTFT, ".0f"),
    ("mean TPOT", ("figures", "tpot_ms", "mean"), ".1f"),
)


def report(folder: Path, plots: Sequence[str] = ()) -> str:
    """Of every result below `folder`. ValueError when there is none."""
    results = Results(folder)
    found = rows(results)
    parts = [
        "# Results",
        *_about(found),
        "",
        _LIMITS,
        *_remarks(folder),
        "",
        "## Do the sides agree?",
        "",
        *_gates(folder),
    ]
    parts += ["", "## Figures", "", _HEAD.format(slots=DEFAULT_SLOTS)]
    for place in places(found):
        parts += ["", f"### {place.title}", "", *_table(found, place), "", *_peaks(found, place)]
        parts += ["", *_budgets(found, place)]
    parts += ["", "## Where Graft does not win here", "", *_losses(found)]
    parts += ["", "## Not measured", "", *_missing(found)]
    if plots:
        parts += ["", "## Plots", "", *(f"![{Path(path).stem}]({path})" for path in plots)]
    return "\n".join(parts)


def _remarks(folder: Path) -> Iterator[str]:
    """What a person has written about these results, in REMARKS of their folder."""
    if (folder / REMARKS).exists():
        yield from ("", (folder / REMARKS).read_text().strip())


def _about(found: Sequence[Row]) -> Iterator[str]:
    """Machines and versions, each distinct one once, with the commits that were measured."""
    commits: dict[str, list[str]] = {}
    for row in found:
        for result in row.results:
            versions = _once(result["about"]["versions"])
            commit = str(versions.pop("commit", None) or "unknown")
            commit += " with changes" if versions.pop("commit_dirty", None) else ""
            same = json.dumps(result["about"] | {"versions": versions}, sort_keys=True)
            commits.setdefault(same, []).append(commit)
    for text, measured in commits.items():
        about = json.loads(text)
        names = [f"{name} {value}" for name, value in about["versions"].items() if value]
        yield ""
        yield f"Measured on: {about['machine']}. Model: {about['model']}, {about['dtype']}."
        yield f"Versions: {', '.join(names)}."
        yield f"Commits: {', '.join(dict.fromkeys(measured))}."


def _once(versions: dict[str, Any]) -> dict[str, Any]:
    """Of a machine with several GPUs older files have the driver's version once for each."""
    driver = versions.get("driver")
    if not driver:
        return dict(versions)
    return versions | {"driver": ", ".join(dict.fromkeys(driver.split()))}


def _table(found: Sequence[Row], place: Place) -> Iterator[str]:
    yield "| " + " | ".join(_COLUMNS) + " |"
    yield "|---|" + "---:|" * (len(_COLUMNS) - 1)
    for row in found:
        if row.place == place:
            yield "| " + " | ".join(_cells(found, row)) + " |"


def _cells(found: Sequence[Row], row: Row) -> list[str]:
    if not row.results:
        return [row.label, _rate(row), f"**{_why_not(row)}**", *[""] * (len(_COLUMNS) - 3)]
    cut = "≥" if any(r["figures"]["ttft_cut"] for r in row.results) else ""
    gigabytes = 1e-9
    return [
        row.label,
        _rate(row),
        cut + _number(row, "figures", "ttft_ms", "mean", form=".0f"),
        cut + _number(row, "figures", "ttft_ms", "p50", form=".0f"),
        cut + _number(row, "figures", "ttft_ms", "p99", form=".0f"),
        _number(row, "figures", "tpot_ms", "mean", form=".1f"),
        _number(row, "figures", "tpot_ms", "p99", form=".1f"),
        _number(row, "figures", "requests_per_s", form=".2f"),
        _number(row, "figures", "output_tokens_per_s", form=".0f"),
        _number(row, "figures", "prefix_hit_rate", form=".0%"),
        _number(row, "moved", "loads", form=".0f"),
        _number(row, "moved", "evictions", form=".0f"),
        _number(row, "moved", "bytes_to_device", form=".3g", scale=gigabytes),
        _number(row, "moved", "bytes_to_host", form=".3g", scale=gigabytes),
        _number(row, "moved", "invalid_kv_share", "mean", form=".1%"),
        _number(row, "moved", "used_share", "mean", form=".0%"),
        _answered(row),
        *_ratios(found, row),
    ]


def _rate(row: Row) -> str:
    return "-" if row.rate is None else f"{row.rate:g}"


def _number(row: Row, *path: str, form: str, scale: float = 1.0) -> str:
    values = sorted(value * scale for value in row.values(*path))
    if not values:
        return "-"
    middle = row.middle(*path)
    assert middle is not None, path
    text = format(middle * scale, form)
    if len(values) == 1:
        return text
    low, high = (values[round(q * (len(values) - 1))] for q in (0.2, 0.8))
    return f"{text} ({low:{form}}-{high:{form}})"


def _ratios(found: Sequence[Row], row: Row) -> tuple[str, str]:
    """To the best and the default split; under base traffic, to the server without LoRA."""
    if row.peer["base_traffic"]:
        own = pairs.pairs(row, pairs.without_lora(found, row), *pairs.TTFT)
        text = pairs.told(own, row)
        return text if text == "-" else f"{text} of base", "-"
    best = pairs.pairs(row, pairs.splits(found, row), *pairs.TTFT)
    default = pairs.pairs(row, pairs.default_split(found, row), *pairs.TTFT)
    several = [pair for pair in best if pair.tried > 1]
    if several or row.is_split:
        return pairs.told(several, row), pairs.told(default, row)
    only = " of the only one" if best else ""
    return pairs.told(best, row) + only, pairs.told(default, row)


def _answered(row: Row) -> str:
    total = {
        key: sum(r["figures"][key] for r in row.results)
        for key in ("completed", "sent", "errors", "unfinished", "not_sent")
    }
    text = f"{total['completed']} of {total['sent']}"
    wrong = [
        f"{total[key]} {key.replace('_', ' ')}"
        for key in ("errors", "unfinished", "not_sent")
        if total[key]
    ]
    return ", ".join([text, *wrong])


def _why_not(row: Row) -> str:
    if not row.problems:
        return "missing"
    first = row.problems[0]
    text = str(first["why"]).splitlines()[-1 if first["status"] == "failed" else 0]
    return f"{first['status']}: {text[:160].replace('|', '/')}"


def _peaks(found: Sequence[Row], place: Place) -> Iterator[str]:
    """The highest rate that each peer serves, where more than one was tried."""
    labels = list(dict.fromkeys(row.label for row in found if row.place == place))
    peaks = {label: peak(found, place, label) for label in labels}
    rates = {row.rate for row in found if row.place == place and row.results}
    if len(rates) < 2:
        return
    yield (
        f"Highest rate tried with mean TTFT below {GOAL_TTFT_MS:g} ms, no failed request, and at"
        f" most {CUT_SHARE:.0%} of those sent without a token at the end, whichever seed was"
        " tried. Over the default split's: at least, for each seed that both have:"
    )
    yield ""
    yield "| peer | rate | over the default split's |"
    yield "|---|---:|---:|"
    for label, own in peaks.items():
        over = pairs.over_default_peak(found, place, label)
        yield f"| {label} | {_peak_rate(own)} | {'-' if over is None else f'> {over:.2f}x'} |"


def _peak_rate(own: Peak) -> str:
    if own.rate is None:
        return "not measured" if own.fails is None else f"below {own.fails:g}"
    return f"≥ {own.rate:g}" if own.fails is None else f"{own.rate:g} to {own.fails:g}"


def _budgets(found: Sequence[Row], place: Place) -> Iterator[str]:
    """How each peer cuts the budget, once for each."""
    seen: dict[str, dict[str, Any]] = {}
    starts: dict[str, list[float]] = {}
    for row in found:
        if row.place == place:
            starts.setdefault(row.label, []).extend(_starts_alone(row))
            for result in (*row.results, *row.problems):
                seen.setdefault(row.label, result["split"])
    yield "| peer | start, s | adapters, bytes | KV tokens | how the budget is cut |"
    yield "|---|---:|---:|---:|---|"
    for label, cut in seen.items():
        start = f"{statistics.median(starts[label]):.0f}" if starts[label] else "-"
        yield (
            f"| {label} | {start} | {cut['adapter_bytes']} | {cut['kv_tokens']} | "
            f"{cut['arithmetic']} |"
        )
    yield from _company([row for row in found if row.place == place])


def _starts_alone(row: Row) -> Iterator[float]:
    """Seconds of starts that no other start slowed down."""
    for result in row.results:
        if "start_s" in result and result.get("started_together", 1) == 1:
            yield result["start_s"]


def _company(own: Sequence[Row]) -> Iterator[str]:
    """Which servers were measured while others stood on the device, idle or paused."""
    beside: dict[tuple[str, str], list[int]] = {}
    for row in own:
        for result in row.results:
            if result.get("started_together", 1) > 1:
                how = "paused" if result.get("paused") else "idle"
                beside.setdefault((row.label, how), []).append(result["beside"])
    if beside:
        yield ""
        yield (
            "Started together with others, and measured one at a time while others stood on the "
            "device, idle or paused (their start times say nothing and are left out): "
            + "; ".join(
                f"{label}, {'-'.join(str(n) for n in sorted({min(seen), max(seen)}))} {how}"
                for (label, how), seen in beside.items()
            )
            + "."
        )


def _losses(found: Sequence[Row]) -> Iterator[str]:
    """Figures of Graft that are no better than those of the static split with the best mean TTFT
    for the same requests, worst first."""
    worse = []
    for row in found:
        if row.peer["engine"] == "graft" and not row.peer["base_traffic"]:
            tried = pairs.splits(found, row)
            for best in pairs.pairs(row, tried, *pairs.TTFT):
                split = [r for r in tried if r.label == best.label]
                for what, path, form in _LOSSES:
                    same = (p for p in pairs.pairs(row, split, *path) if p.seed == best.seed)
                    worse += [(pair, row, what, form) for pair in same if pair.ratio >= 1.0]
    if not worse:
        yield "No row with Graft has a mean TTFT or TPOT at or above that of the best static split."
        return
    yield "| workload | peer | rate | seed | figure, ms | | best split by TTFT | ratio |"
    yield "|---|---|---:|---:|---|---:|---|---:|"
    for pair, row, what, form in sorted(worse, key=lambda entry: -entry[0].ratio):
        yield (
            f"| {row.place.title} | {row.label} | {_rate(row)} | {pair.seed} | {what} | "
            f"{pair.own:{form}} | {pair.label}: {pair.other:{form}} | {pair.ratio:.2f}x |"
        )


def _missing(found: Sequence[Row]) -> Iterator[str]:
    lines = [
        f"- {row.place.title}, {row.label}, rate {_rate(row)}: {row.missing} of {row.asked} units"
        for row in found
        if row.missing
    ]
    yield from lines or ["Every unit that was asked for was tried."]


def _gates(folder: Path) -> Iterator[str]:
    """Graft against stock on the same questions, and each side against itself."""
    found = [json.loads(path.read_text()) for path in sorted((folder / "gates").glob("*.json"))]
    if not found:
        yield "Not asked."
        return
    yield (
        "Greedy answers of the base model and of adapters of every rank. A parting above the "
        "tolerance (gap of the two best log-probabilities) is a disagreement. Mean difference: of "
        "the log-probabilities before they part."
    )
    yield ""
    yield "| workload | sides | equal | widest gap where they part | mean difference | agree |"
    yield "|---|---|---:|---:|---:|---|"
    for one in found:
        label = one["peer"]["label"]
        yield _gate_line(one, f"{label}: alone, all at once", one["itself"])
        stock = next((g for g in found if g["peer"]["engine"] == "stock" and _same(one, g)), None)
        if one["peer"]["engine"] != "stock" and stock is not None:
            verdict = gate.compare(stock["alone"], one["alone"], one["dtype"])
            yield _gate_line(one, f"{stock['peer']['label']}, {label}", verdict)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("workload", "budget_gb"))


def _gate_line(one: dict[str, Any], sides: str, verdict: dict[str, Any]) -> str:
    agree = "yes" if verdict["agree"] else "**no**"
    return (
        f"| {one['workload']}, {one['budget_gb']:g} GB | {sides} | "
        f"{verdict['equal']} of {verdict['answers']} | "
        f"{verdict['largest_gap_where_they_part']:.4f} (tolerance {verdict['tolerance']}) | "
        f"{verdict['mean_logprob_difference']:.2g} | {agree} |"
    )
