"""FlashInfer's grouped GEMM against these shrink and expand kernels, at the sizes of a prefill.

    python benchmark/kernels/bench_segment_gemm.py [--quick] [--json OUT]

One linear of a Llama-3.1-8B layer (o: 4096 to 4096; down: 14336 to 4096), bf16. First each result
is compared with float64. A CUDA graph holds several layers with weights of their own; contestants
take turns. Microseconds of a layer for x @ A.T ("shrink"), for out += s @ B.T * scale ("expand")
and for both; medians of the replays with p20/p80.

All is in the grouped GEMM's favour: the tiles of a matrix adjoin here, so that it takes one product
for each segment whatever the rank, the rows of a segment adjoin, and its arguments are there
already. It cannot add to what a base layer wrote, so expanding takes one more pass over the
outputs. These kernels sum partial results, so their shrink alone is less than the whole of x @ A.T.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from contestants import SCALE, Batch, Graft
from measure import capture, in_turn, where
from rich.console import Console
from rich.table import Table
from synthetic import RANK_TILE, Projection, SyntheticPool

from graft_kernels.segment_gemm import flashinfer, segment_gemm
from graft_kernels.sgmv import Side
from graft_kernels.sgmv.dispatch import expand_config, shrink_config
from graft_kernels.sgmv.triton_expand import expand
from graft_kernels.sgmv.triton_shrink import shrink

DEVICE = torch.device("cuda")
O_PROJ, DOWN = Projection("o", 4096, (4096,)), Projection("down", 14336, (4096,))
LAYERS = 8
ERROR = 1e-2
Step = Callable[[int], object]
"""What is measured, for one layer."""


@dataclass(frozen=True)
class Case:
    projection: Projection
    rank: int
    segments: int
    rows: int

    @property
    def name(self) -> str:
        return (
            f"{self.projection.name} r{self.rank}, {self.segments} x {self.rows // self.segments}"
        )

    @property
    def batch(self) -> Batch:
        count = self.segments
        return Batch(tuple(range(1, count + 1)), (self.rows // count,) * count, False)


CASES = [
    Case(projection, rank, segments, rows)
    for projection in (O_PROJ, DOWN)
    for rank in (16, 64)
    for segments in (1, 8)
    for rows in (512, 2048, 8192)
]
QUICK = [CASES[0], CASES[5], CASES[6], CASES[-1]]


def addresses(pool: SyntheticPool, side: Side) -> torch.Tensor:
    """Of the first tile of each adapter; the others follow it, or the run ends here."""
    table, rank = pool.weights.addresses[1:].cpu(), pool.ranks[0]
    tile = RANK_TILE * side.features * pool.dtype.itemsize
    for i in range(-(-rank // RANK_TILE)):
        assert torch.equal(table[:, side.first + i], table[:, side.first] + i * tile)
    return table[:, side.first].to(pool.weights.addresses.device)


class Grouped:
    """FlashInfer's, with its arguments for all layers made before."""

    def __init__(self, pool: SyntheticPool, case: Case, x: torch.Tensor, out: torch.Tensor) -> None:
        device, lengths = x.device, torch.tensor(case.batch.lengths)
        self.counts = lengths.to(device)
        self.starts = (lengths.cumsum(0) - lengths).to(device)
        self.pool, self.case, self.x, self.out = pool, case, x, out
        self.s = x.new_empty(case.rows, case.rank)
        self.delta = torch.empty_like(out)
        pieces = [layer[case.projection.name][0] for layer in pool.slices]
        self.a = [addresses(pool, piece.a) for piece in pieces]
        self.b = [addresses(pool, piece.b) for piece in pieces]
        rows = self.starts, self.counts
        self.shrinks = [
            flashinfer.gemm_arguments(x, *rows, a, self.s, transposed=True) for a in self.a
        ]
        self.expands = [
            flashinfer.gemm_arguments(self.s, *rows, b, self.delta, transposed=False)
            for b in self.b
        ]

    def shrink(self, layer: int) -> None:
        flashinfer.launch(self.shrinks[layer], self.s, True)

    def expand(self, layer: int) -> None:
        flashinfer.launch(self.expands[layer], self.delta, False)
        self.out.add_(self.delta, alpha=SCALE)

    def both(self, layer: int) -> None:
        self.shrink(layer)
        self.expand(layer)

    def check(self, layer: int) -> None:
        """The same through the API, which makes the arguments each time."""
        rows, arena = (self.starts, self.counts), self.pool.weights.arena
        segment_gemm(self.x, *rows, self.a[layer], self.s, transposed=True, arena=arena)
        segment_gemm(self.s, *rows, self.b[layer], self.delta, transposed=False, arena=arena)
        self.out.add_(self.delta, alpha=SCALE)


class Ours:
    def __init__(self, pool: SyntheticPool, case: Case, x: torch.Tensor, out: torch.Tensor) -> None:
        self.pool, self.case, self.x, self.out = pool, case, x, out
        graft = Graft(pool, case.rows)
        graft.describe(case.batch)
        self.kernels, self.plan = graft.kernels, graft.kernels._plan_of_batch
        features, shape = case.projection.inputs, self.plan.shape
        self.first = shrink_config(shape, case.rows, features)
        self.second = expand_config(shape)
        self.partial = self.kernels._partial_sums(self.first.splits, 1, case.rows)

    def shrink(self, layer: int) -> None:
        pieces = self.pool.slices[layer][self.case.projection.name]
        shrink(self.x, pieces, self.plan, self.pool.weights, self.partial, self.first)

    def expand(self, layer: int) -> None:
        pieces = self.pool.slices[layer][self.case.projection.name]
        expand(self.partial, pieces, self.plan, self.pool.weights, self.out, self.second)

    def both(self, layer: int) -> None:
        self.kernels.apply(self.x, self.pool.slices[layer][self.case.projection.name], self.out)

    check = both


def error_of(pool: SyntheticPool, case: Case, who: Ours | Grouped, step: Step) -> float:
    who.x.normal_()
    who.out.normal_(std=0.1)
    layer = pool.layers - 1
    pieces = pool.slices[layer][case.projection.name]
    exact = pool.dense(who.x, pieces, case.batch.of_row, who.out)
    step(layer)
    return float((who.out.double() - exact).norm() / exact.norm())


def measure(case: Case, replays: int) -> dict[str, Any]:
    most = -(-case.rank // RANK_TILE) * RANK_TILE
    ranks = (case.rank,) * case.segments
    pool = SyntheticPool((case.projection,), LAYERS, ranks, DEVICE, max_rank=most)
    width = sum(case.projection.widths)
    x = torch.zeros(case.rows, case.projection.inputs, dtype=pool.dtype, device=DEVICE)
    out = torch.zeros(case.rows, width, dtype=pool.dtype, device=DEVICE)
    graphs, error = {}, {}
    for name, who in (
        ("graft", Ours(pool, case, x, out)),
        ("flashinfer", Grouped(pool, case, x, out)),
    ):
        error[name] = max(error_of(pool, case, who, step) for step in (who.check, who.both))
        if not error[name] <= ERROR:
            raise AssertionError(f"{case.name}: {name} is off by {error[name]:.3g}, over {ERROR}")
        for part in ("shrink", "expand", "both"):
            graphs[f"{name} {part}"] = capture(partial(_all_layers, getattr(who, part)))
    times = in_turn(graphs, replays, 1e3 / LAYERS)
    return {"case": case.name, "rows": case.rows, "layers": LAYERS, "us": times, "error": error}


def _all_layers(step: Step) -> None:
    for layer in range(LAYERS):
        step(layer)


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="Microseconds of one linear (p20-p80)")
    shown.add_column("case")
    parts = list(rows[0]["us"])
    for title in (*parts, "both, ratio"):
        shown.add_column(title, justify="right")
    for row in rows:
        times = row["us"]
        cells = [f"{t['p50']:.1f} ({t['p20']:.1f}-{t['p80']:.1f})" for t in times.values()]
        ratio = times["graft both"]["p50"] / times["flashinfer both"]["p50"]
        shown.add_row(row["case"], *cells, f"{ratio:.2f}x")
    return shown


def main(
    quick: Annotated[bool, typer.Option(help="four cases, few replays")] = False,
    replays: Annotated[int, typer.Option(min=1)] = 20,
    out: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        raise typer.BadParameter("wanted a device of compute capability 9.x, whose GEMM overwrites")
    console, here, rows = Console(width=160), where(), []
    for case in QUICK if quick else CASES:
        begin = time.perf_counter()
        rows.append(measure(case, 5 if quick else replays))
        console.print(f"{case.name}: measured in {time.perf_counter() - begin:.1f} s")
    console.print(table(rows))
    console.print(str(here))
    if out:
        result = {"bench": "segment_gemm", **here, "rows": rows}
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
