"""The work lists of a batch against a brute-force model."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft_kernels.sgmv.plan import Plan, Shape

SLOTS, MAX_TILES, MAX_TOKENS = 6, 4, 200
TILES = np.array([0, 1, 2, 4, 0, 3], dtype=np.int32)

Batch = list[tuple[int, int]]
"""(slot, rows) of each request."""

batches = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 40)), max_size=20).filter(
    lambda batch: sum(rows for _, rows in batch) <= MAX_TOKENS
)
shapes = st.builds(Shape, st.sampled_from([16, 32, 64]), st.integers(1, 40))


def make(shape: Shape, max_tokens: int = MAX_TOKENS) -> Plan:
    return Plan(max_tokens, SLOTS, MAX_TILES, shape, "cpu")


def fill(plan: Plan, batch: Batch) -> None:
    plan.fill([slot for slot, _ in batch], [rows for _, rows in batch], TILES)


def lists(plan: Plan) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Items and parts up to the first empty one, and all row positions."""
    found = []
    for table in (plan.items, plan.parts):
        used = [line for line in table.tolist() if any(line)]
        assert used == table[: len(used)].tolist(), "an empty entry stands before a used one"
        found.append(used)
    return found[0], found[1], plan.rows.tolist()


def model(batch: Batch, block_rows: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Tokens by row position, and blocks: slot, first position, rows."""
    of_token = [slot for slot, rows in batch for _ in range(rows)]
    order: list[int] = []
    blocks = []
    for slot in range(1, SLOTS):
        mine = [token for token, owner in enumerate(of_token) if owner == slot]
        for start in range(0, len(mine), block_rows):
            blocks.append((slot, len(order) + start, min(block_rows, len(mine) - start)))
        order += mine
    return order, blocks


@given(batches, shapes)
def test_blocks_items_and_parts_are_those_of_the_model(batch: Batch, shape: Shape) -> None:
    plan = make(shape)
    fill(plan, batch)
    items, parts, rows = lists(plan)
    order, blocks = model(batch, shape.block_rows)
    assert rows == order + [0] * (MAX_TOKENS - len(order))
    assert items == [[*block, tile] for block in blocks for tile in range(TILES[block[0]])]
    each = len(parts) // len(blocks) if blocks else 0
    assert parts == [[*block, part, each, 0, 0, 0] for block in blocks for part in range(each)]


@given(batches, shapes)
def test_every_row_of_an_adapter_has_each_share_once(batch: Batch, shape: Shape) -> None:
    plan = make(shape)
    fill(plan, batch)
    _, parts, rows = lists(plan)
    of_token = [slot for slot, count in batch for _ in range(count)]
    shares: dict[int, list[tuple[int, int]]] = {}
    for slot, first, count, part, each, *_ in parts:
        assert 1 <= count <= shape.block_rows
        for token in rows[first : first + count]:
            assert of_token[token] == slot
            shares.setdefault(token, []).append((part, each))
    assert sorted(shares) == [token for token, slot in enumerate(of_token) if slot]
    for share in shares.values():
        assert share == [(part, len(share)) for part in range(len(share))]


@given(batches, shapes)
def test_what_is_launched_covers_the_lists(batch: Batch, shape: Shape) -> None:
    plan = make(shape)
    fill(plan, batch)
    items, parts, _ = lists(plan)
    total, blocks = sum(rows for _, rows in batch), model(batch, shape.block_rows)[1]
    assert len(blocks) <= plan.blocks_for(total)
    assert len(parts) <= plan.parts_for(total) <= plan.max_parts
    assert len(items) <= plan.max_items
    if blocks:
        # No more of the programs stay idle than do not divide by the blocks.
        assert len(parts) > plan.parts_for(total) - len(blocks)
    for rows in range(total, MAX_TOKENS + 1):  # a graph launches for as many rows as it pads to
        assert plan.parts_for(rows) >= plan.parts_for(total)


@settings(max_examples=200)
@given(st.lists(st.one_of(st.none(), batches), min_size=2, max_size=6), shapes)
def test_nothing_of_the_batches_before_is_left(history: list[Batch | None], shape: Shape) -> None:
    plan = make(shape)
    for batch in history:
        fresh = make(shape)
        if batch is None:
            plan.clear()
        else:
            fill(plan, batch)
            fill(fresh, batch)
            assert torch.equal(plan.rows, fresh.rows)
        assert torch.equal(plan.items, fresh.items)
        assert torch.equal(plan.parts, fresh.parts)


def test_lists_stay_where_they_are() -> None:
    plan = make(Shape(16, 8))
    before = [table.data_ptr() for table in (plan.items, plan.parts, plan.rows)]
    fill(plan, [(1, 3), (3, 100)])
    plan.clear()
    fill(plan, [(5, 1)])
    assert [table.data_ptr() for table in (plan.items, plan.parts, plan.rows)] == before
    assert len({pointer % 4 for pointer in before}) == 1


@pytest.mark.parametrize("batch", [[], [(0, 0)], [(0, 5), (0, 1)], [(3, 0)]])
def test_batches_without_work(batch: Batch) -> None:
    plan = make(Shape(16, 8))
    fill(plan, [(3, 40)])
    fill(plan, batch)
    assert lists(plan)[:2] == ([], [])


def test_an_adapter_without_ranks_has_no_items() -> None:
    plan = make(Shape(16, 8))
    fill(plan, [(4, 5)])
    items, parts, _ = lists(plan)
    assert items == []
    assert [part[:3] for part in parts] == [[4, 0, 5]] * 8


def test_a_full_plan() -> None:
    plan = make(Shape(16, 1), max_tokens=64)
    fill(plan, [(3, 16), (3, 16), (3, 16), (3, 16)])
    items, parts, rows = lists(plan)
    assert len(items) == 4 * MAX_TILES
    assert len(parts) == plan.parts_for(64) // 4 * 4
    assert rows == list(range(64))


def test_a_batch_larger_than_the_plan_is_refused() -> None:
    plan = make(Shape(16, 8))
    with pytest.raises(ValueError, match="at most 200 rows, got 2 lengths of 201 rows"):
        plan.fill([1, 0], [200, 1], TILES)
    with pytest.raises(ValueError, match=r"one length for each of 2 slots .* got 1 lengths"):
        plan.fill([1, 0], [1], TILES)


@pytest.mark.parametrize(
    ("tokens", "slots", "shape"),
    [
        (0, 2, Shape(16, 1)),
        (1, 1, Shape(16, 1)),
        (1, 2, Shape(8, 1)),
        (1, 2, Shape(24, 1)),
        (1, 2, Shape(16, 0)),
    ],
)
def test_impossible_plans_are_refused(tokens: int, slots: int, shape: Shape) -> None:
    with pytest.raises(ValueError, match="Plan: wanted max_tokens >= 1, slots >= 2, block_rows"):
        Plan(tokens, slots, 1, shape, "cpu")


@pytest.mark.parametrize("tokens", [1, 5, 4999, 5003, 8192])
def test_lists_are_aligned_alike_whatever_their_length(tokens: int) -> None:
    plan = Plan(tokens, SLOTS, 4, Shape(16, 7), "cpu")
    assert all(table.data_ptr() % 16 == 0 for table in (plan.items, plan.parts, plan.rows))
    assert len(plan.rows) == tokens
