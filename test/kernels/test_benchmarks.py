"""The kernel benchmarks, as far as they run without a device: batches, buffers and contestants.

With TRITON_INTERPRET=1 the contestants that are Triton kernels, SGLang's too, run as well.
"""

import ctypes
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "kernels"))

import bench_segment_gemm
import bench_sgmv
from contestants import (
    Batch,
    Buffers,
    Contestant,
    Csgmv,
    Graft,
    Torch,
    TritonBackend,
    batch_info,
    chunk_rows,
    chunked,
    padded,
    whole,
)
from measure import spread
from synthetic import LLAMA_8B, Projection, SyntheticPool

from graft_kernels.sgmv.plan import Shape

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL = (
    Projection("qkv", 48, (40, 24, 24)),
    Projection("o", 40, (48,)),
    Projection("gate_up", 48, (56, 56)),
)
RANKS = (8, 16, 33)
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def make_pool() -> SyntheticPool:
    return SyntheticPool(SMALL, 2, RANKS, torch.device("cpu"), torch.float32, max_rank=48)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    slots = draw(st.lists(st.integers(1, 3), min_size=1, max_size=12))
    if draw(st.booleans()):
        return Batch(tuple(slots), (1,) * len(slots), True)
    lengths = draw(st.lists(st.integers(1, 90), min_size=len(slots), max_size=len(slots)))
    return Batch(tuple(slots), tuple(lengths), False)


@given(batches(), st.sampled_from([16, 32, 64, 128]))
def test_segments_hold_each_row_once_with_its_adapter(batch: Batch, most: int) -> None:
    for segments in (chunked(batch, most), whole(batch, 3)):
        order = segments.order or list(range(batch.tokens))
        assert sorted(order) == list(range(batch.tokens))
        assert segments.starts[0] == 0
        assert segments.starts[-1] == batch.tokens
        assert len(segments.starts) == len(segments.adapters) + 1
        bounds = zip(segments.starts, segments.starts[1:], segments.adapters, strict=False)
        for start, end, adapter in bounds:
            assert 0 <= end - start <= segments.longest
            assert {batch.of_row[row] for row in order[start:end]} <= {adapter + 1}


@pytest.mark.parametrize(
    ("tokens", "most", "wanted"),
    [(8192, 16, 16), (8192, 128, 128), (255, 128, 32), (64, 64, 32), (63, 64, 16), (256, 64, 64)],
)
def test_the_chunk_rule_of_csgmv(tokens: int, most: int, wanted: int) -> None:
    assert chunk_rows(tokens, most) == wanted


def test_the_chunk_rule_is_that_of_sglang() -> None:
    from sglang.srt.lora.backend.chunked_backend import ChunkedSgmvLoRABackend

    for most in (16, 32, 64, 128):
        backend = object.__new__(ChunkedSgmvLoRABackend)
        backend.max_chunk_size = most
        for tokens in (1, 16, 63, 64, 255, 256, 8192):
            assert backend._determine_chunk_size_for_tokens(tokens) == chunk_rows(tokens, most)


def test_batch_info() -> None:
    batch = Batch((2, 1, 2), (3, 20, 1), False)
    info = batch_info(chunked(batch, 16), RANKS, torch.device("cpu"))
    assert info.seg_indptr.tolist() == [0, 16, 20, 24]
    assert info.weight_indices.tolist() == [0, 0, 1]
    assert info.seg_lens.tolist() == [16, 4, 4]
    assert info.permutation.tolist() == [*range(3, 23), 0, 1, 2, 23]
    assert info.lora_ranks.tolist() == list(RANKS)
    assert info.lora_ranks.dtype == info.permutation.dtype == info.seg_lens.dtype == torch.int32
    info = batch_info(whole(batch, 3), RANKS, torch.device("cpu"))
    assert info.permutation is None
    assert (info.bs, info.max_len) == (3, 20)


def test_padded_buffers_hold_the_matrices() -> None:
    pool = make_pool()
    for projection in SMALL:
        a, b = padded(pool, 1, projection)
        assert a.shape == (3, 48 * len(projection.widths), projection.inputs)
        assert b.shape == (3, sum(projection.widths), 48)
        for index, rank in enumerate(RANKS):
            assert not a[index, rank * len(projection.widths) :].any()
            assert not b[index, :, rank:].any()
            for i, piece in enumerate(pool.slices[1][projection.name]):
                wanted = pool.matrix(piece.a, index + 1).float()
                assert torch.equal(a[index, i * rank : (i + 1) * rank], wanted)


def everyone(pool: SyntheticPool) -> dict[str, Contestant]:
    found: dict[str, Contestant] = {"torch": Torch(pool)}
    if INTERPRETED:
        buffers = Buffers(pool)
        found |= {"graft": Graft(pool, 64), "triton": TritonBackend(buffers)}
        found |= {"csgmv": Csgmv(buffers, 16), "csgmv 128": Csgmv(buffers, 128)}
    return found


@pytest.mark.parametrize("decode", [True, False])
def test_contestants_are_right(decode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # SGLang looks for tuned block sizes by the name of the device, of which there is none.
    monkeypatch.setattr("sglang.kernels.ops.gemm.lora_tuning_config.get_device_name", lambda: "-")
    monkeypatch.setattr("graft_kernels.sgmv.device.DECODE", Shape(16, programs=6))
    monkeypatch.setattr("graft_kernels.sgmv.device.PREFILL", Shape(64, programs=6))
    pool = make_pool()
    batch = Batch((2, 1, 3, 2, 3), (1,) * 5 if decode else (3, 20, 1, 1, 9), decode)
    for name, who in everyone(pool).items():
        who.describe(batch)
        assert bench_sgmv.errors(pool, who, batch) < 1e-5, name


def test_a_wrong_contestant_is_found() -> None:
    pool = make_pool()
    who, batch = Torch(pool), Batch((2, 1), (1, 1), True)
    who.describe(Batch((1, 1), (1, 1), True))
    assert bench_sgmv.errors(pool, who, batch) > bench_sgmv.ERROR


def test_cases() -> None:
    for case in bench_sgmv.DECODE + bench_sgmv.PREFILL:
        assert case.batch.tokens == case.rows
        assert set(case.batch.slots) == set(range(1, len(case.ranks) + 1))
        assert 4 <= case.layers() <= bench_sgmv.MAX_LAYERS
    case = bench_sgmv.DECODE[0]
    features = 3 * 4096 + 6144 + 4096 + 4096 + 2 * 4096 + 28672 + 14336 + 4096
    assert bench_sgmv.weight_bytes(LLAMA_8B, case.ranks) == 2 * 16 * features
    rows = 4096 + 4096 + 4096 + 14336 + 2 * (6144 + 4096 + 28672 + 4096)
    assert bench_sgmv.floor_bytes(LLAMA_8B, case) == 2 * (16 * features + 64 * rows)


def test_the_table_shows_every_contestant() -> None:
    time = spread([1.0, 2.0, 3.0])
    assert time["p50"] == 2.0
    common = {"floor_bytes": 1e6, "share": {"graft": 0.5}}
    rows = [
        {"case": "decode", "us": {"graft": time, "csgmv": time}, **common},
        {"case": "prefill", "us": {"graft": time, "csgmv": time, "csgmv 128": time}, **common},
    ]
    shown = bench_sgmv.table(rows)
    assert [column.header for column in shown.columns][-3:] == ["graft", "csgmv", "csgmv 128"]
    assert list(shown.columns[-1].cells) == ["-", "2.0 (1.4-2.6) 1.00x"]


def at(address: int, rows: int, columns: int, stride: int) -> np.ndarray:
    """A float32 matrix in memory."""
    numbers = (ctypes.c_float * ((rows - 1) * stride + columns)).from_address(address)
    return np.lib.stride_tricks.as_strided(
        np.frombuffer(numbers, dtype=np.float32), (rows, columns), (4 * stride, 4)
    )


def grouped_gemm(arguments: tuple[torch.Tensor, ...], out: torch.Tensor, transposed: bool) -> None:
    """What FlashInfer does with its arguments."""
    for (m, n, k), x, w, y, x_ld, w_ld, y_ld in zip(*(a.tolist() for a in arguments), strict=True):
        weight = at(w, n, k, w_ld).T if transposed else at(w, k, n, w_ld)
        at(y, m, n, y_ld)[:] = at(x, m, k, x_ld) @ weight


@pytest.mark.parametrize("rank", [16, 48])
def test_grouped_gemms_of_the_benchmark(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_segment_gemm.flashinfer, "launch", grouped_gemm)
    projection = Projection("o", 64, (32,))
    case = bench_segment_gemm.Case(projection, rank, 3, 12)
    pool = SyntheticPool(
        (projection,), 2, (rank,) * 3, torch.device("cpu"), torch.float32, max_rank=rank
    )
    x, out = torch.zeros(12, 64), torch.zeros(12, 32)
    who = bench_segment_gemm.Grouped(pool, case, x, out)
    for step in (who.check, who.both):
        assert bench_segment_gemm.error_of(pool, case, who, step) < 1e-5
    if INTERPRETED:
        monkeypatch.setattr("graft_kernels.sgmv.device.PREFILL", Shape(64, programs=6))
        ours = bench_segment_gemm.Ours(pool, case, x, out)
        assert bench_segment_gemm.error_of(pool, case, ours, ours.both) < 1e-5

        def parts(layer: int) -> None:
            ours.shrink(layer)
            ours.expand(layer)

        assert bench_segment_gemm.error_of(pool, case, ours, parts) < 1e-5


def test_cases_of_the_segment_gemm() -> None:
    cases = bench_segment_gemm.CASES
    assert len({case.name for case in cases}) == len(cases)
    assert set(bench_segment_gemm.QUICK) <= set(cases)
    assert all(case.batch.tokens == case.rows for case in cases)
