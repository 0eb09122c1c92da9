"""Which launch parameters serve which batch: by its rows alone, so that graphs can keep them.

Measured on an H200 with the projections of an 8B model (benchmark/kernels, results beside it).
Times are those of all four projections of a layer. What decided:

- More splits shorten the chain of loads of a shrinking program, and make `expand` add up more
  partial sums. With few rows the chain is what costs, with many the sums.
- Few rows of an adapter: 16-row blocks, the least that a matrix instruction takes; pieces of 256
  outputs in three stages keep enough bytes of B on their way, and 128 registers let four programs
  run on each multiprocessor. `programs` are one such wave.
- Many rows: 64-row blocks read B less often; pieces of 128 outputs keep their sums in registers.
- FlashInfer's grouped GEMM (`graft_kernels.segment_gemm`) was slower than this at every size.
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
