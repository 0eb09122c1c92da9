"""LoRA layers tell the backend before their base product, where they apply adapters."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.lora.layers import (
    ColumnParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)

from sglang_graft.engine import early_shrink

X = torch.ones(2, 3)


def layer(kind: type[torch.nn.Module], said: list[Any], **base: Any) -> Any:
    """A LoRA layer with its second buffer under its own name, whose `forward` notes that it ran."""

    class Layer(kind):  # type: ignore[misc, valid-type]
        lora_active = True

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.base_layer = SimpleNamespace(**base)
            setattr(self, kind.set_lora_info.__code__.co_varnames[2], "weights")
            self.lora_backend = SimpleNamespace(begin=lambda x, w: said.append((x, w)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            said.append("forward")
            return x

    return Layer()


def backend(begun: int = 0) -> Any:
    return SimpleNamespace(begun=begun)


def test_the_backend_hears_of_the_rows_before_the_base_product() -> None:
    said: list[Any] = []
    column = layer(ColumnParallelLinearWithLoRA, said)
    qkv = layer(QKVParallelLinearWithLoRA, said)
    row = layer(RowParallelLinearWithLoRA, said, input_is_parallel=True)
    counted = backend()
    with early_shrink.early(counted, [column, qkv, row]):
        for each in (column, qkv, row):
            each(X)
        counted.begun = 3
    assert said == [(X, "weights"), "forward"] * 3


def test_not_without_adapters_and_not_where_rows_would_be_split() -> None:
    said: list[Any] = []
    idle = layer(ColumnParallelLinearWithLoRA, said)
    splits = layer(RowParallelLinearWithLoRA, said, input_is_parallel=False)
    counted = backend()
    with early_shrink.early(counted, [idle, splits, torch.nn.Linear(1, 1)]):
        idle.lora_active = False
        idle(X)
        splits(X)
        counted.begun = 1  # by others, so that the end finds nothing wrong
    assert said == ["forward"] * 2


def test_layers_are_as_before_once_graphs_are_captured_or_failed() -> None:
    said: list[Any] = []
    column = layer(ColumnParallelLinearWithLoRA, said)
    counted = backend()
    with early_shrink.early(counted, [column]):
        counted.begun = 1
    with pytest.raises(ZeroDivisionError), early_shrink.early(counted, [column]):
        raise ZeroDivisionError
    column(X)
    assert said == ["forward"]
    assert not column._forward_pre_hooks


def test_graphs_in_which_no_layer_began_are_an_error() -> None:
    column = layer(ColumnParallelLinearWithLoRA, [])
    # What was begun in an earlier capture does not count.
    with (
        pytest.raises(RuntimeError, match=r"1 LoRA layers .* not called as in 0\.5\.17"),
        early_shrink.early(backend(5), [column]),
    ):
        pass
    splits = layer(RowParallelLinearWithLoRA, [], input_is_parallel=False)
    with early_shrink.early(backend(), [splits]):
        pass  # nobody was to begin
