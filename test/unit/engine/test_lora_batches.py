"""Rows of a forward grouped by adapter slot."""

import torch

from sglang_graft.engine.lora_batches import make_groups

CPU = torch.device("cpu")


def rows(slots: list[int], lengths: list[int]) -> dict[int, list[int]]:
    total = torch.arange(sum(lengths))
    return {group.slot: total[group.rows].tolist() for group in make_groups(slots, lengths, CPU)}


def test_base_only_has_no_group() -> None:
    assert make_groups([0, 0], [3, 4], CPU) == []


def test_adjoining_requests_of_one_slot_are_one_slice() -> None:
    groups = make_groups([2, 2, 1], [3, 4, 1], CPU)
    assert [(g.slot, g.rows) for g in groups] == [(2, slice(0, 7)), (1, slice(7, 8))]


def test_scattered_requests_keep_row_order() -> None:
    assert rows([1, 0, 2, 1], [2, 1, 2, 3]) == {1: [0, 1, 5, 6, 7], 2: [3, 4]}
