"""Which launch parameters serve which batch: by its rows alone, so that graphs can keep them.

Chosen by trials on one H200 with the projections of an 8B model, batch 64 (layers of base GEMM and
LoRA as one CUDA graph; times are what LoRA adds to the 32 layers' 3.9 ms):

- splits of 8 (16 for 14336 inputs): more splits shorten a program's chain of loads, and make
  `expand` add up more partial sums. With few rows the chain is what costs, with many the sums.
- Decode: 16-row blocks, the least that a matrix instruction takes; pieces of 256 outputs in three
  stages keep enough bytes of B on their way, and 128 registers let four programs run on each
  multiprocessor; `programs` are one such wave. 1, 8 and 32 adapters of rank 16 add 1.2, 1.4 and
  1.8 ms with overlap, 8 of rank 64 add 2.1 ms. In a server, without overlap, they add 1.4, 1.4,
  2.0 and 2.3 ms to a step (`benchmark/serving/results/decode_h200.json`).
- Prefill: 64-row blocks read B less often; pieces of 128 outputs keep their sums in registers.
  8192 rows of gate_up: 288 us to expand, where reading and writing the output takes 240 us.

Not yet compared in one run with other kernels (`benchmark/kernels/bench_sgmv.py` does), nor with
FlashInfer's grouped GEMM (`graft_kernels.segment_gemm`, `bench_segment_gemm.py`), which therefore
no batch is sent to.
"""

from dataclasses import dataclass

from graft_kernels.sgmv.plan import Shape

LONG_INPUT = 8192
"""Input features from which a decode shrink has twice the splits."""
PREFILL_SIZES = (512, 2048, 2049)
"""Rows of a prefill up to which it has 8, 4 and then 2 splits."""


@dataclass(frozen=True, slots=True)
class Shrink:
    """Parameters of a shrink launch.

    splits: parts of the input features, a power of two.   block_k: features of a step.
    overlap: start while the kernel before still ends (programmatic dependent launch).
    """

    splits: int
    block_k: int = 128
    warps: int = 4
    stages: int = 3
    overlap: bool = True


@dataclass(frozen=True, slots=True)
class Expand:
    """Parameters of an expand launch.

    block_n: outputs of a piece.   wide: ranks at a time where a rank is above one tile, in pieces
    of `block_n / wider` outputs.   registers: the most that a thread may use; None: no limit.
    """

    block_n: int
    warps: int = 4
    stages: int = 1
    wide: int = 64
    wider: int = 2
    wide_stages: int = 1
    registers: int | None = None
    overlap: bool = True


DECODE = Shape(block_rows=16, programs=528)
PREFILL = Shape(block_rows=64, programs=528)


def shrink_config(shape: Shape, tokens: int, features: int, *, overlap: bool = True) -> Shrink:
    """For `tokens` rows of `features` inputs each."""
    if shape.block_rows == DECODE.block_rows:
        return Shrink(splits=16 if features >= LONG_INPUT else 8, overlap=overlap)
    small, medium, _ = PREFILL_SIZES
    return Shrink(splits=8 if tokens <= small else 4 if tokens <= medium else 2, overlap=overlap)


def expand_config(shape: Shape, *, overlap: bool = True) -> Expand:
    """For the rows that `shape` cuts."""
    if shape.block_rows == DECODE.block_rows:
        return Expand(256, stages=3, wider=4, wide_stages=2, registers=128, overlap=overlap)
    return Expand(128, overlap=overlap)


def partial_numbers(shape: Shape, tokens: int, slices: int, ranks: int) -> int:
    """The most float32 numbers that partial sums take for up to `tokens` rows."""
    sizes = {tokens, *(size for size in PREFILL_SIZES if size < tokens)}
    most = max(size * shrink_config(shape, size, LONG_INPUT).splits for size in sizes)
    return most * slices * ranks
