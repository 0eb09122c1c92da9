"""LoRA of one decoder layer: these kernels against SGLang's csgmv and triton backends and torch.

    python benchmark/kernels/bench_sgmv.py [--quick] [--only decode|prefill] [--json OUT]

The four projections of a Llama-3.1-8B layer (qkv, o, gate and up, down), bf16, every row with an
adapter. All contestants apply the same matrices; first each result is compared with float64. A CUDA
graph holds several layers with weights of their own, so that the cache of the device does not hold
them; rows and outputs are shared, as the projection before has just written them in a server too.
Contestants take turns; times are microseconds of a layer, medians of the replays with p20/p80.

Bytes are the least that must move: each adapter's matrices once, the rows once, and the outputs
read and written. The share is their part of what a large device copy reached in the same run.

csgmv runs with its default chunks of 16 rows, and in prefill with chunks of up to 128 as well.
What this does not show: the time to describe a batch, the launches of graphs for larger batches,
and other work that runs beside these kernels.
"""

import json
import os
import time
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from contestants import Batch, Buffers, Contestant, Csgmv, Graft, Torch, TritonBackend
from measure import capture, copy_bandwidth, in_turn, where
from rich.console import Console
from rich.table import Table
from synthetic import LLAMA_8B, RANK_TILE, Projection, SyntheticPool

DEVICE = torch.device("cuda")
WEIGHT_BYTES = 200 << 20
"""Of all layers of a case at least, unless that takes more than MAX_LAYERS."""
MAX_LAYERS = 64
PREFILL_ROWS = 16384
"""Layers times rows of a prefill case."""
ERROR = 1e-2


@dataclass(frozen=True)
class Case:
    """`ranks[i]` is that of adapter i; requests use them in turn."""

    name: str
    ranks: tuple[int, ...]
    rows: int
    decode: bool

    @property
    def batch(self) -> Batch:
        slots = range(1, len(self.ranks) + 1)
        if self.decode:
            return Batch(tuple(islice(cycle(slots), self.rows)), (1,) * self.rows, True)
        return Batch(tuple(slots), (self.rows // len(slots),) * len(slots), False)

    def layers(self, projections: tuple[Projection, ...] = LLAMA_8B) -> int:
        if not self.decode:
            return min(16, max(4, PREFILL_ROWS // self.rows))
        return min(MAX_LAYERS, max(4, -(-WEIGHT_BYTES // weight_bytes(projections, self.ranks))))


def weight_bytes(projections: tuple[Projection, ...], ranks: tuple[int, ...]) -> int:
    """Of one layer, bf16."""
    features = sum(len(p.widths) * p.inputs + sum(p.widths) for p in projections)
    return 2 * sum(ranks) * features


def floor_bytes(projections: tuple[Projection, ...], case: Case) -> int:
    """The least that one layer moves, bf16."""
    rows = sum(p.inputs + 2 * sum(p.widths) for p in projections)
    return weight_bytes(projections, case.ranks) + 2 * case.rows * rows


DECODE = [
    Case(f"decode 64, {name}", ranks, 64, True)
    for name, ranks in (
        ("1 r16", (16,)),
        ("8 r16", (16,) * 8),
        ("32 r16", (16,) * 32),
        ("8 r64", (64,) * 8),
        ("8 r8-r64", (8, 16, 32, 64) * 2),
    )
]
PREFILL = [
    Case(f"prefill {rows}, {count} r16", (16,) * count, rows, False)
    for rows in (256, 1024, 4096, 8192)
    for count in (1, 8)
]
QUICK = [DECODE[0], DECODE[2], PREFILL[2], PREFILL[3]]


def make_pool(case: Case, layers: int, device: torch.device) -> SyntheticPool:
    most = -(-max(case.ranks) // RANK_TILE) * RANK_TILE
    return SyntheticPool(LLAMA_8B, layers, case.ranks, device, max_rank=most)


def contestants(pool: SyntheticPool, case: Case) -> dict[str, Contestant]:
    buffers = Buffers(pool)
    found: dict[str, Contestant] = {
        "graft": Graft(pool, case.rows),
        "csgmv": Csgmv(buffers, 16),
        "triton": TritonBackend(buffers),
        "torch": Torch(pool),
    }
    if not case.decode:
        found["csgmv 128"] = Csgmv(buffers, 128)
    return found


def errors(pool: SyntheticPool, who: Contestant, batch: Batch) -> float:
    """The largest relative error of any projection of the first and the last layer."""
    device, worst = pool.weights.arena.device, 0.0
    for layer in {0, pool.layers - 1}:
        for projection in pool.projections:
            x = torch.randn(batch.tokens, projection.inputs, device=device, dtype=pool.dtype)
            base = (
                torch.randn(batch.tokens, sum(projection.widths), device=device, dtype=pool.dtype)
                * 0.1
            )
            pieces = pool.slices[layer][projection.name]
            exact = pool.dense(x, pieces, batch.of_row, base)
            who.apply(layer, projection, x, base)
            error = (base.double() - exact).norm() / exact.norm()
            assert error.isfinite(), f"{type(who).__name__}: {projection.name} is not finite"
            worst = max(worst, error.item())
    return worst


def measure(case: Case, replays: int, bandwidth: float) -> dict[str, Any]:
    batch, layers = case.batch, case.layers()
    pool = make_pool(case, layers, DEVICE)
    tensors = {
        p.name: tuple(
            torch.zeros(case.rows, width, device=DEVICE, dtype=pool.dtype)
            for width in (p.inputs, sum(p.widths))
        )
        for p in LLAMA_8B
    }
    for x, _ in tensors.values():
        x.normal_()
    graphs, error = {}, {}
    for name, who in contestants(pool, case).items():
        who.describe(batch)
        error[name] = errors(pool, who, batch)
        if error[name] > ERROR:
            raise AssertionError(
                f"{case.name}: {name} is off by {error[name]:.3g}, more than {ERROR}"
            )

        def step(who: Contestant = who) -> None:
            for layer in range(layers):
                for projection in LLAMA_8B:
                    who.apply(layer, projection, *tensors[projection.name])

        graphs[name] = capture(step)
    times = in_turn(graphs, replays, 1e3 / layers)
    floor = floor_bytes(LLAMA_8B, case)
    share = {name: floor / bandwidth / (t["p50"] * 1e-6) for name, t in times.items()}
    return {
        "case": case.name,
        "rows": case.rows,
        "ranks": case.ranks,
        "layers": layers,
        "floor_bytes": floor,
        "us": times,
        "share": share,
        "error": error,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    shown = Table(title="LoRA of one layer: microseconds (p20-p80), ratio to csgmv")
    for title in ("case", "MB", "share", *names):
        shown.add_column(title, justify="left" if title == "case" else "right")
    for row in rows:
        cells = []
        for name in names:
            t = row["us"].get(name)
            ratio = t and t["p50"] / row["us"]["csgmv"]["p50"]
            cells.append(
                f"{t['p50']:.1f} ({t['p20']:.1f}-{t['p80']:.1f}) {ratio:.2f}x" if t else "-"
            )
        megabytes, share = row["floor_bytes"] / 1e6, row["share"]["graft"]
        shown.add_row(row["case"], f"{megabytes:.1f}", f"{share:.0%}", *cells)
    return shown


def main(
    quick: Annotated[bool, typer.Option(help="four cases, few replays")] = False,
    only: Annotated[str, typer.Option(help="decode or prefill")] = "",
    replays: Annotated[int, typer.Option(min=1)] = 25,
    out: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
) -> None:
    # SGLang keeps kernels by a key without the rank, which is right with one rank a process only.
    os.environ["SGLANG_USE_CUSTOM_TRITON_KERNEL_CACHE"] = "0"
    console, here, bandwidth = Console(width=160), where(), copy_bandwidth()
    cases = [case for case in (QUICK if quick else DECODE + PREFILL) if case.name.startswith(only)]
    if not cases:
        raise typer.BadParameter(f"--only: wanted decode or prefill, got {only}")
    rows = []
    for case in cases:
        begin = time.perf_counter()
        rows.append(measure(case, 5 if quick else replays, bandwidth))
        console.print(f"{case.name}: measured in {time.perf_counter() - begin:.1f} s")
        torch.cuda.empty_cache()
    console.print(table(rows))
    console.print(f"{here}; copy {bandwidth / 1e12:.2f} TB/s; share is graft's")
    if out:
        result = {"bench": "sgmv", **here, "copy_bytes_per_s": bandwidth, "rows": rows}
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
