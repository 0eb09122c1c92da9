"""Which launch parameters serve which batch: by its rows alone, so that graphs can keep them.

Chosen by trials on one H200 with the projections of an 8B model, batch 64 (layers of base GEMM and
LoRA as one CUDA graph; times are what LoRA adds to the 32 layers' 3.98 ms):

- splits of 8 (16 for 14336 inputs): more splits shorten a program's chain of loads, and make
  `expand` add up more partial sums. With few rows the chain is what costs, with many the sums.
- Decode: 16-row blocks, the least that a matrix instruction takes; pieces of 256 outputs in three
  stages keep enough bytes of B on their way, and 128 registers let four programs run on each
  multiprocessor; `programs` are one such wave. 264 without that limit are 0.06 ms better for one
  adapter of rank 16 and 0.06 ms worse for 32.
- Decode, order: one launch after the other, 1 / 8 / 32 adapters of rank 16 add 1.29 / 1.37 / 1.85
  ms, 8 of rank 64 add 2.19 ms. With `shrink` beside the base GEMM on a second stream 0.94 / 1.13 /
  1.72 / 2.09 ms; with `expand` launched early too (programmatic dependent launch), as decode graphs
  have it, 0.87 / 1.08 / 1.67 / 2.00 ms. Both launches early, on one stream: 1.10 / 1.23 / 1.71 /
  2.06 ms. `expand` beside the base GEMM as well, into a buffer that a third launch adds: 0.93 /
  1.06 / 1.93 / 2.05 ms. An empty batch costs 0.42 ms: these are launches.
- Prefill: 64-row blocks read B less often; pieces of 128 outputs keep their sums in registers.
  8192 rows of gate_up: 288 us to expand, where reading and writing the output takes 240 us.

`benchmark/kernels/results/sgmv_h200.json` compares with SGLang's kernels: 0.20x to 0.38x of csgmv
in prefill of 256 to 8192 rows, 0.34x to 0.54x in decode.

FlashInfer's grouped GEMM (`graft_kernels.segment_gemm`) gets no batch: in `segment_gemm_h200.json`
(512 to 8192 rows, ranks 16 and 64) both products of a linear take these kernels 0.14x to 0.63x of
its time. Only x @ A.T of 8192 rows and rank 64 is quicker there (36 us against 42, 99 against 116).
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
    """

    splits: int
    block_k: int = 128
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, slots=True)
class Expand:
    """Parameters of an expand launch.

    block_n: outputs of a piece.   wide: ranks at a time where a rank is above one tile, in pieces
    of `block_n / wider` outputs.   registers: the most that a thread may use; None: no limit.
    overlap: start while the launches before still end (programmatic dependent launch).
    """

    block_n: int
    warps: int = 4
    stages: int = 1
    wide: int = 64
    wider: int = 2
    wide_stages: int = 1
    registers: int | None = None
    overlap: bool = False


DECODE = Shape(block_rows=16, programs=528)
PREFILL = Shape(block_rows=64, programs=528)


def shrink_config(shape: Shape, tokens: int, features: int) -> Shrink:
    """For `tokens` rows of `features` inputs each."""
    if shape.block_rows == DECODE.block_rows:
        return Shrink(splits=16 if features >= LONG_INPUT else 8)
    small, medium, _ = PREFILL_SIZES
    return Shrink(splits=8 if tokens <= small else 4 if tokens <= medium else 2)


def expand_config(shape: Shape, *, overlap: bool = False) -> Expand:
    """For the rows that `shape` cuts. Only decode overlaps."""
    if shape.block_rows == DECODE.block_rows:
        return Expand(256, stages=3, wider=4, wide_stages=2, registers=128, overlap=overlap)
    return Expand(128)


def partial_numbers(shape: Shape, tokens: int, slices: int, ranks: int) -> int:
    """The most float32 numbers that partial sums take for up to `tokens` rows."""
    sizes = {tokens, *(size for size in PREFILL_SIZES if size < tokens)}
    most = max(size * shrink_config(shape, size, LONG_INPUT).splits for size in sizes)
    return most * slices * ranks
