"""Plots of results: TTFT over rate, its distribution, and who owned the pool when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sglang_graft.bench.table import GOAL_TTFT_MS, Place, Row, places, rows
from sglang_graft.bench.units import Results

# Owners from the bottom up; what is left to the top is free.
_OWNERS = {"adapter": "adapters", "kv_running": "running KV", "kv_cached": "cached KV"}


def draw(folder: Path, target: Path) -> list[Path]:
    """Write every plot that the results below `folder` allow; returns their files.

    ValueError when matplotlib is missing or there is no result.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plots: wanted matplotlib; pip install 'sglang-graft[plot]'") from None
    found = [row for row in rows(Results(folder)) if row.results]
    target.mkdir(parents=True, exist_ok=True)
    drawn = []
    for place in places(found):
        own = [row for row in found if row.place == place]
        start = "-".join(str(part) for part in (place.workload, f"{place.budget_gb:g}gb"))
        if place.adapters is not None:
            start += f"-{place.adapters}adapters"
        for what, paint in (("ttft", _over_rate), ("cdf", _cdf), ("pool", _timeline)):
            figure = Figure(layout="constrained")
            if paint(figure, place, own):
                path = target / f"{start}-{what}.png"
                figure.savefig(path, dpi=110)
                drawn.append(path)
    return drawn


def _over_rate(figure: Any, place: Place, own: Sequence[Row]) -> bool:
    """Mean TTFT over the rate, one line a peer."""
    lines = {
        label: [(r.rate, r.ttft_ms) for r in own if r.label == label and r.rate is not None]
        for label in _labels(own)
    }
    if all(len(line) < 2 for line in lines.values()):
        return False
    figure.set_size_inches(6, 4)
    panel = figure.subplots()
    for label, line in lines.items():
        if line:
            x, y = zip(*sorted(line), strict=True)
            panel.plot(x, y, "o-", label=label)
    panel.axhline(GOAL_TTFT_MS, color="grey", linestyle=":", linewidth=1)
    panel.set(
        title=place.title, xlabel="first turns a second", ylabel="mean TTFT, ms", yscale="log"
    )
    panel.legend(fontsize="small")
    return True


def _cdf(figure: Any, place: Place, own: Sequence[Row]) -> bool:
    """Shares of requests whose first token came within a time, one panel a rate."""
    rates = list(dict.fromkeys(row.rate for row in own))
    figure.set_size_inches(4.5 * len(rates), 4)
    panels = figure.subplots(1, len(rates), squeeze=False)[0]
    for panel, rate in zip(panels, rates, strict=True):
        for row in own:
            if row.rate == rate:
                values = np.sort([v for r in row.results for v in _first_tokens(r["records"])])
                panel.step(
                    values * 1e3, np.arange(1, len(values) + 1) / len(values), label=row.label
                )
        shown = "protocol's rate" if rate is None else f"{rate:g} first turns/s"
        panel.set(title=shown, xlabel="TTFT, ms", ylabel="share of requests", xscale="log")
        panel.legend(fontsize="small")
    figure.suptitle(place.title)
    return True


def _first_tokens(records: dict[str, list[Any]]) -> Iterable[float]:
    for ttft, waited in zip(records["ttft_s"], records["waited_s"], strict=True):
        yield waited if ttft is None else ttft


def _timeline(figure: Any, place: Place, own: Sequence[Row]) -> bool:
    """Bytes by owner over time, one panel a peer, at the highest rate of each."""
    shown = {
        label: max((r for r in own if r.label == label), key=lambda r: r.rate or 0)
        for label in _labels(own)
    }
    shown = {label: row for label, row in shown.items() if row.results[0]["samples"]}
    if not shown:
        return False
    figure.set_size_inches(4.5 * len(shown), 3.5)
    panels = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for panel, (label, row) in zip(panels, shown.items(), strict=True):
        samples = row.results[0]["samples"]
        layers = [np.array(samples[owner]) / 1e9 for owner in _OWNERS]
        panel.stackplot(samples["at_s"], *layers, labels=_OWNERS.values())
        panel.plot(
            samples["at_s"], np.array(samples["kv_invalid"]) / 1e9, "k--", label="of it invalid KV"
        )
        panel.plot(samples["at_s"], np.array(samples["budget"]) / 1e9, "k-", linewidth=0.8)
        title = label if row.rate is None else f"{label}, {row.rate:g}/s"
        panel.set(title=title, xlabel="seconds")
    panels[0].set(ylabel="GB")
    panels[0].legend(fontsize="small")
    figure.suptitle(place.title)
    return True


def _labels(own: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.label for row in own))
