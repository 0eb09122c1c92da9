"""Segmented LoRA against dense float64, from tiles in an arena in which all other bytes are NaN."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from lora_bench import ARENA_BYTES, MAX_RANK, WIDTHS, Bench, K, N, make_groups

from graft_kernels.sgmv import Group, Slice, Vector, Weights, expand, sgmv, shrink
from graft_kernels.sgmv.reference import TileReader


def assert_exact(bench: Bench, groups: Sequence[Group], tokens: int) -> None:
    x = torch.randn(tokens, K, dtype=torch.float64)
    base = torch.randn(tokens, N, dtype=torch.float64)
    got = sgmv(x, bench.slices, groups, bench.weights, base.clone())
    torch.testing.assert_close(got, bench.dense(x, groups, base), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("gap", [0, 128])
def test_random_ranks_slots_and_absent_linears(seed: int, gap: int) -> None:
    torch.manual_seed(seed)
    bench = Bench(slots=6, gap=gap)
    for slot in range(1, 6):
        for column in range(3):
            if torch.rand(()) < 0.7:
                bench.load(slot, column, int(torch.randint(1, MAX_RANK + 1, ())))
    assert_exact(bench, make_groups(torch.randint(0, 6, (20,)).tolist()), 20)


@pytest.mark.parametrize("rank", [1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64])
@pytest.mark.parametrize("chunk_features", [8, 16, 40, 1 << 20])
def test_every_tile_edge(rank: int, chunk_features: int) -> None:
    bench = Bench(slots=2, chunk_features=chunk_features)
    for column in range(3):
        bench.load(1, column, rank)
    assert_exact(bench, [Group(1, slice(0, 5))], 5)


def test_mixed_ranks_in_one_batch() -> None:
    bench = Bench(slots=4)
    for slot, rank in ((1, 8), (2, 64), (3, 16)):
        for column in range(3):
            bench.load(slot, column, rank)
    x = torch.randn(6, K, dtype=torch.float64)
    groups = make_groups([3, 1, 2, 0, 1, 3])
    s = shrink(x, bench.slices, groups, bench.weights)
    assert s.shape == (6, 3, 64)
    assert s.dtype == x.dtype
    assert not s[3].any()
    assert not s[1, :, 8:].any()
    assert s[2].all()
    assert_exact(bench, groups, 6)


def test_the_largest_rank_is_that_of_the_batch_and_not_of_the_table() -> None:
    bench = Bench(slots=3)
    bench.load(1, 0, 4)
    bench.load(2, 0, 32)
    x = torch.randn(2, K)
    assert shrink(x, bench.slices, make_groups([1, 0]), bench.weights).shape == (2, 3, 4)


@pytest.mark.parametrize("rows", [slice(2, 7), torch.tensor([6, 2, 5])], ids=["slice", "index"])
def test_rows_as_slice_or_numbers(rows: slice | torch.Tensor) -> None:
    bench = Bench(slots=2)
    bench.load(1, 0, 16)
    bench.load(1, 2, 16)
    assert_exact(bench, [Group(1, rows)], 9)


@pytest.mark.parametrize("rows", [slice(0, 0), torch.tensor([], dtype=torch.int64)])
def test_empty_groups(rows: slice | torch.Tensor) -> None:
    bench = Bench(slots=3)
    bench.load(1, 0, 16)
    bench.load(2, 1, 8)
    assert_exact(bench, [Group(1, rows), Group(2, slice(1, 3)), Group(0, rows)], 4)


def test_no_groups_no_tokens_no_slices() -> None:
    bench = Bench(slots=2)
    bench.load(1, 0, 16)
    assert_exact(bench, [], 3)
    assert_exact(bench, [Group(1, slice(0, 0))], 0)
    out = torch.randn(2, N)
    groups = [Group(1, slice(0, 2))]
    assert torch.equal(sgmv(torch.randn(2, K), [], groups, bench.weights, out.clone()), out)


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_single_token(slot: int) -> None:
    bench = Bench(slots=3)
    bench.load(1, 1, 5)
    bench.load(2, 0, 40)
    assert_exact(bench, [Group(slot, slice(0, 1))], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_to_float64_as_plain_torch(dtype: torch.dtype) -> None:
    bench = Bench(slots=4, dtype=dtype)
    for slot, rank in ((1, 7), (2, 64), (3, 16)):
        for column in range(3):
            bench.load(slot, column, rank)
    groups = make_groups([1, 2, 3, 0] * 8)
    x, base = torch.randn(32, K).to(dtype), torch.randn(32, N).to(dtype)
    got = sgmv(x, bench.slices, groups, bench.weights, base.clone())
    exact = bench.dense(x.double(), groups, base.double())
    plain = bench.dense(x, groups, base)
    assert got.dtype == dtype
    error, plain_error = (got - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 1.1 * plain_error + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_without_an_adapter_keep_their_bits(dtype: torch.dtype) -> None:
    bench = Bench(slots=3, dtype=dtype)
    bench.load(1, 0, 16)
    x, out = torch.randn(6, K).to(dtype), torch.randn(6, N).to(dtype)
    out[0, 0], out[1, 1], out[2, 2] = -0.0, float("nan"), float("inf")
    before = out.clone()
    groups = [Group(0, torch.tensor([0, 2])), Group(2, torch.tensor([1])), Group(1, slice(4, 6))]
    sgmv(x, bench.slices, groups, bench.weights, out)  # row 3 is in no group
    assert torch.equal(out[:4].view(torch.uint8), before[:4].view(torch.uint8))
    assert torch.equal(out[4:, WIDTHS[0] :], before[4:, WIDTHS[0] :])
    assert (out[4:, : WIDTHS[0]] != before[4:, : WIDTHS[0]]).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_in_one_adapter_changes_no_row_of_another(bad: float) -> None:
    x, base = torch.randn(6, K), torch.randn(6, N)
    groups = make_groups([1, 2, 0, 1, 2, 1])
    results = []
    for value in (1.0, bad):
        torch.manual_seed(1)
        bench = Bench(slots=3)
        for column in range(3):
            bench.load(1, column, 20)
            bench.load(2, column, 33, value=value)
        results.append(sgmv(x, bench.slices, groups, bench.weights, base.clone()))
    good, spoiled = results
    others = [0, 2, 3, 5]
    assert torch.equal(spoiled[others], good[others])
    assert not spoiled[[1, 4]].isfinite().any()


HAVES = [("mul",), ("add",), ("mul", "add")]


@pytest.mark.parametrize("names", HAVES, ids="-".join)
@pytest.mark.parametrize("chunk_features", [8, 16, 1 << 20])
def test_vectors_of_each_kind_and_chunking(names: tuple[str, ...], chunk_features: int) -> None:
    bench = Bench(slots=2, chunk_features=chunk_features)
    for column in range(3):
        bench.load(1, column, 12)
        for name in names:
            bench.load_vector(1, column, name)
    assert_exact(bench, [Group(1, slice(1, 6))], 7)


@pytest.mark.parametrize("rows", [slice(0, 3), torch.tensor([4, 0, 2])], ids=["slice", "index"])
def test_vectors_of_some_linears(rows: slice | torch.Tensor) -> None:
    bench = Bench(slots=2)
    for column in range(3):
        bench.load(1, column, 4)
    bench.load_vector(1, 0, "mul")
    bench.load_vector(1, 2, "add")
    assert_exact(bench, [Group(1, rows)], 5)


@pytest.mark.parametrize("seed", range(8))
def test_a_mixed_batch_with_and_without_vectors(seed: int) -> None:
    torch.manual_seed(seed)
    bench = Bench(slots=6)
    for slot in range(1, 6):
        for column in range(3):
            if torch.rand(()) < 0.7:
                bench.load(slot, column, int(torch.randint(1, MAX_RANK + 1, ())))
                for name in ("mul", "add"):
                    if torch.rand(()) < 0.5:
                        bench.load_vector(slot, column, name)
    assert_exact(bench, make_groups(torch.randint(0, 6, (20,)).tolist()), 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_vectors_change_no_bit_of_other_rows(dtype: torch.dtype) -> None:
    x, base = torch.randn(8, K).to(dtype), torch.randn(8, N).to(dtype)
    groups = make_groups([1, 2, 0, 3, 2, 1, 0, 3])
    results = []
    for spoilt in (False, True):
        torch.manual_seed(2)
        bench = Bench(slots=4, dtype=dtype)
        for slot in (1, 2, 3):
            bench.load(slot, 0, 9)
        if spoilt:
            bench.load_vector(2, 0, "mul")
            bench.load_vector(2, 0, "add")
            # Rank 0 there: the vector must not count.
            bench.load_vector(3, 1, "mul")
        results.append(sgmv(x, bench.slices, groups, bench.weights, base.clone()))
    plain, changed = (result.view(torch.uint8) for result in results)
    others = [0, 2, 3, 5, 6, 7]
    assert torch.equal(plain[others], changed[others])
    assert not torch.equal(plain[[1, 4]], changed[[1, 4]])
    behind = WIDTHS[0] * dtype.itemsize
    assert torch.equal(plain[:, behind:], changed[:, behind:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vectors_round_once(dtype: torch.dtype) -> None:
    bench = Bench(slots=2, dtype=dtype)
    bench.load(1, 0, 8, value=0.0)  # no delta: what is left is (out + 0) * mul + add
    bench.load_vector(1, 0, "mul")
    bench.load_vector(1, 0, "add")
    out = torch.randn(4, N).to(dtype)
    vectors = bench.vectors[1, 0]
    wanted = (out[:, : WIDTHS[0]].float() * vectors["mul"] + vectors["add"]).to(dtype)
    sgmv(torch.randn(4, K).to(dtype), bench.slices, [Group(1, slice(0, 4))], bench.weights, out)
    assert torch.equal(out[:, : WIDTHS[0]], wanted)


def test_a_slice_that_can_have_no_vectors() -> None:
    bench = Bench(slots=2)
    bench.load(1, 1, 4)
    bench.slices = [Slice(s.a, s.b, s.column, s.out_offset) for s in bench.slices]
    assert_exact(bench, [Group(1, slice(0, 2))], 2)


def test_a_part_of_a_vector_is_a_broken_invariant() -> None:
    bench = Bench(slots=2, chunk_features=16)
    bench.load(1, 0, 4)
    bench.load_vector(1, 0, "add")
    where = bench.slices[0].add
    assert where is not None
    bench.weights.addresses[1, where.first + 1] = 0
    with pytest.raises(AssertionError, match="slot 1 has a part of Vector"):
        sgmv(
            torch.randn(1, K),
            bench.slices,
            [Group(1, slice(0, 1))],
            bench.weights,
            torch.zeros(1, N),
        )


def test_expand_adds_in_place_and_returns_out() -> None:
    bench = Bench(slots=2)
    bench.load(1, 0, 8)
    groups = [Group(1, slice(0, 2))]
    out = torch.ones(2, N)
    s = shrink(torch.randn(2, K), bench.slices, groups, bench.weights)
    assert expand(s, bench.slices, groups, bench.weights, out) is out
    assert not (out[:, : WIDTHS[0]] == 1).any()
    assert (out[:, WIDTHS[0] :] == 1).all()


@pytest.mark.parametrize(
    ("rank", "gap", "shares"), [(16, 128, True), (33, 0, True), (33, 128, False)]
)
def test_adjoining_tiles_are_read_in_place(rank: int, gap: int, shares: bool) -> None:
    bench = Bench(slots=2, gap=gap)
    bench.load(1, 0, rank)
    side = bench.slices[0].a
    matrix = TileReader(bench.weights).matrix(side, 1, rank)
    assert torch.equal(matrix, bench.deltas[1, 0][0])
    assert (matrix.data_ptr() == bench.weights.addresses[1, side.first].item()) == shares


def test_a_rank_without_its_tiles_is_a_broken_invariant() -> None:
    bench = Bench(slots=2)
    bench.load(1, 0, 17)
    bench.weights.addresses[1, bench.slices[0].a.first + 1] = 0
    with pytest.raises(AssertionError, match="slot 1 has a rank for an absent tile 1"):
        shrink(torch.randn(1, K), bench.slices, [Group(1, slice(0, 1))], bench.weights)


@pytest.mark.parametrize(
    ("shift", "reason"), [(-4096, "outside"), (ARENA_BYTES, "outside"), (1, "not aligned")]
)
def test_an_address_that_is_no_tile_is_a_broken_invariant(shift: int, reason: str) -> None:
    bench = Bench(slots=2)
    bench.load(1, 0, 4)
    bench.weights.addresses[1, bench.slices[0].a.first] += shift
    with pytest.raises(AssertionError, match=reason):
        shrink(torch.randn(1, K), bench.slices, [Group(1, slice(0, 1))], bench.weights)


def test_wrong_shapes_are_refused() -> None:
    bench = Bench(slots=2)
    rest = bench.slices, [Group(0, slice(0, 2))], bench.weights
    with pytest.raises(ValueError, match=r"x: wanted \[T, 48\], got \[2, 47\]"):
        shrink(torch.zeros(2, K - 1), *rest)
    with pytest.raises(ValueError, match="x: wanted a floating-point matrix"):
        shrink(torch.zeros(2, K, dtype=torch.int32), *rest)
    with pytest.raises(ValueError, match=r"out: wanted \[T, at least 88\], got \[2, 87\]"):
        expand(torch.zeros(2, 3, 4), *rest, torch.zeros(2, N - 1))
    with pytest.raises(ValueError, match=r"s: wanted torch.float32 \[2, 3, R\]"):
        expand(torch.zeros(2, 2, 4), *rest, torch.zeros(2, N))
    short = [replace(bench.slices[0], add=Vector(0, 1, 8, 8))]
    with pytest.raises(ValueError, match=r"slices: wanted vectors of 40 features, got Vector"):
        expand(torch.zeros(2, 1, 4), short, *rest[1:], torch.zeros(2, N))
    with pytest.raises(ValueError, match=r"s: wanted torch.float16 \[2, 3, R\]"):
        expand(torch.zeros(2, 3, 4), *rest, torch.zeros(2, N, dtype=torch.float16))


def test_wrong_tables_are_refused() -> None:
    good = Bench(slots=2).weights
    with pytest.raises(ValueError, match=r"Weights\.ranks: wanted torch\.int32 of 2 dimensions"):
        Weights(good.addresses, good.scales, good.scales, good.arena, good.dtype)
    with pytest.raises(ValueError, match=r"addresses \[slots, tiles\]"):
        Weights(good.addresses[:1], good.ranks, good.scales, good.arena, good.dtype)
