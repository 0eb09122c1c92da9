"""Segment GEMM against float64, with weights scattered over an arena in which all else is NaN."""

from dataclasses import dataclass

import pytest
import torch

from graft_kernels.segment_gemm import segment_gemm

ARENA_BYTES = 64 << 20
CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]


@dataclass
class Segments:
    """Random weights for segments of `counts` rows, with rows of no segment between them."""

    counts: list[int]
    inputs: int
    outputs: int
    transposed: bool
    dtype: torch.dtype
    device: str = "cpu"

    def __post_init__(self) -> None:
        shape = (self.outputs, self.inputs) if self.transposed else (self.inputs, self.outputs)
        self.arena = torch.full((ARENA_BYTES,), 0xFF, dtype=torch.uint8, device=self.device)
        self.weights, addresses, end = [], [], 0
        for _ in self.counts:
            weight = torch.randn(shape).to(self.device, self.dtype)
            data = weight.view(torch.uint8).reshape(-1)
            end += 4096  # a page between any two
            self.arena[end : end + len(data)] = data
            addresses.append(self.arena.data_ptr() + end)
            end += -(-len(data) // 4096) * 4096
            self.weights.append(weight)
        firsts, row = [], 3
        for count in self.counts:
            firsts.append(row)
            row += count + 2
        self.firsts, self.rows = firsts, row
        self.starts, self.lengths, self.addresses = (
            torch.tensor(values, dtype=torch.int64, device=self.device)
            for values in (firsts, self.counts, addresses)
        )

    def run(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return segment_gemm(
            x,
            self.starts,
            self.lengths,
            self.addresses,
            out,
            transposed=self.transposed,
            arena=self.arena,
        )

    def check(self, error: float, *, wide: int = 0) -> None:
        """Against float64; `wide` more columns on either side of both matrices stay as they are."""
        x = torch.randn(self.rows, self.inputs + 2 * wide).to(self.device, self.dtype)
        out = torch.full((self.rows, self.outputs + 2 * wide), float("nan")).to(x)
        x_part = x[:, wide : wide + self.inputs]
        part = out[:, wide : wide + self.outputs]
        assert self.run(x_part, part) is part
        untouched = torch.ones(out.shape, dtype=torch.bool, device=self.device)
        for first, count, weight in zip(self.firsts, self.counts, self.weights, strict=True):
            rows = slice(first, first + count)
            untouched[rows, wide : wide + self.outputs] = False
            matrix = weight.double().T if self.transposed else weight.double()
            exact = x_part[rows].double() @ matrix
            assert (part[rows].double() - exact).norm() <= error * exact.norm()
        assert out[untouched].isnan().all()


both = pytest.mark.parametrize("transposed", [True, False])
COUNTS = ([5], [1, 0, 17, 3], [0, 0], [0, 4])


@both
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("wide", [0, 3])
def test_the_reference(transposed: bool, counts: list[int], wide: int) -> None:
    Segments(counts, 24, 40, transposed, torch.float64).check(1e-14, wide=wide)
    Segments(counts, 17, 5, transposed, torch.float32).check(1e-5, wide=wide)


def test_the_reference_sums_in_the_dtype_of_x() -> None:
    segments = Segments([4], 64, 8, True, torch.bfloat16)
    x = torch.randn(segments.rows, 64, dtype=torch.float64)
    out = torch.zeros(segments.rows, 8, dtype=torch.bfloat16)
    wanted = (x[3:7] @ segments.weights[0].double().T).to(torch.bfloat16)
    assert torch.equal(segments.run(x, out)[3:7], wanted)


def test_no_segments() -> None:
    segments = Segments([], 8, 8, True, torch.float32)
    segments.check(0.0)


def test_broken_invariants_of_the_reference() -> None:
    segments = Segments([2], 8, 8, True, torch.float32)
    x, out = torch.zeros(segments.rows, 8), torch.zeros(segments.rows, 8)
    segments.addresses += 2
    with pytest.raises(AssertionError, match="not aligned"):
        segments.run(x, out)
    segments.addresses -= ARENA_BYTES
    with pytest.raises(AssertionError, match="outside of the arena"):
        segments.run(x, out)
    segments.lengths += 10
    with pytest.raises(AssertionError, match=r"rows 3 \+ 12 of 7"):
        segments.run(x, out)


def test_wrong_arguments_are_refused() -> None:
    segments = Segments([2, 1], 8, 16, True, torch.float32)
    x, out = torch.zeros(segments.rows, 8), torch.zeros(segments.rows, 16)
    for bad in (x.int(), x[0], x.T.contiguous().T):
        with pytest.raises(ValueError, match="x: wanted a floating-point matrix"):
            segments.run(bad, out)
    with pytest.raises(ValueError, match=r"out: wanted \[10, N\], got \[9, 16\]"):
        segments.run(x, out[1:])
    good = segments.lengths
    for wrong in (good.int(), good[:1], good[None]):
        segments.lengths = wrong
        with pytest.raises(ValueError, match=r"counts: wanted torch\.int64 \[2\], got"):
            segments.run(x, out)
    segments.lengths = good
    segments.arena = segments.arena.view(torch.int8)
    with pytest.raises(ValueError, match=r"arena: wanted torch\.uint8"):
        segments.run(x, out)


def test_the_arguments_of_the_grouped_gemm() -> None:
    from graft_kernels.segment_gemm.flashinfer import _clear, gemm_arguments

    segments = Segments([5, 0, 2], 24, 40, True, torch.bfloat16)
    x = torch.zeros(segments.rows, 32, dtype=torch.bfloat16)[:, :24]
    out = torch.ones(segments.rows, 40, dtype=torch.bfloat16)
    where = segments.starts, segments.lengths, segments.addresses
    sizes, xs, weights, outs, *strides = gemm_arguments(x, *where, out, transposed=True)
    assert sizes.dtype == torch.int32
    assert sizes.tolist() == [[5, 40, 24], [0, 40, 24], [2, 40, 24]]
    assert xs.tolist() == [x.data_ptr() + first * 64 for first in segments.firsts]
    assert outs.tolist() == [out.data_ptr() + first * 80 for first in segments.firsts]
    assert torch.equal(weights, segments.addresses)
    assert [stride.tolist() for stride in strides] == [[32] * 3, [24] * 3, [40] * 3]
    assert gemm_arguments(x, *where, out, transposed=False)[5].tolist() == [40] * 3
    assert {tensor.dtype for tensor in (xs, weights, outs, *strides)} == {torch.int64}
    _clear(out, segments.starts, segments.lengths)
    mine = [row for row in range(segments.rows) if not out[row].any()]
    assert mine == [3, 4, 5, 6, 7, 12, 13]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@both
@pytest.mark.parametrize("counts", [*COUNTS, [1000, 1, 0, 129, 64, 300]], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 16), (16, 4096), (8, 136), (1024, 64)])
class TestOnTheDevice:
    pytestmark = gpu

    def test_flashinfer(
        self,
        dtype: torch.dtype,
        transposed: bool,
        counts: list[int],
        inputs: int,
        outputs: int,
    ) -> None:
        segments = Segments(counts, inputs, outputs, transposed, dtype, "cuda")
        segments.check(5e-3)
        segments.check(5e-3, wide=8)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_what_cutlass_cannot_load_is_refused() -> None:
    segments = Segments([2], 16, 16, True, torch.bfloat16, "cuda")
    x = torch.zeros(segments.rows, 24, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(segments.rows, 16, dtype=torch.bfloat16, device="cuda")
    for bad in (x[:, :12], x[:, 1:17]):
        with pytest.raises(ValueError, match="x: wanted a width, a row stride and a start"):
            segments.run(bad, out)
    with pytest.raises(ValueError, match="x and out: wanted both"):
        segments.run(x[:, :16].float(), out)
    segments.lengths = segments.lengths.cpu()
    with pytest.raises(ValueError, match="counts: wanted it on cuda:0, got cpu"):
        segments.run(x[:, :16], out)
