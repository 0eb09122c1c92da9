"""Graphs with and without adapters: which are captured, which is replayed, and what both read."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.lora.layers import ColumnParallelLinearWithLoRA
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_utils import capture_mode

from sglang_graft.engine.graphs import (
    BASE_PREFILL_ROWS,
    HOOKS,
    capture_both,
    capture_prefill,
    is_recording_adapters,
    replay_prefill,
    share_wrappers,
)
from sglang_graft.engine.hooks import problem


class Backend(SimpleNamespace):
    """What FlashInfer's backend keeps: the last wrappers of each batch size."""

    def __init__(self) -> None:
        super().__init__(decode_cuda_graph_metadata={}, forward_metadata=None)

    def prepare(self, bs: int, mode: ForwardMode = ForwardMode.DECODE) -> Any:
        share_wrappers(_original, self, bs, bs, mode, None)
        return self.forward_metadata


def _original(self: Any, bs: int, num_tokens: int, mode: ForwardMode, spec_info: Any) -> None:
    wrappers = [object()]
    if mode.is_decode_or_idle():
        self.decode_cuda_graph_metadata[bs] = wrappers
    self.forward_metadata = SimpleNamespace(decode_wrappers=wrappers)


@pytest.fixture(autouse=True)
def no_variant_left() -> Any:
    yield
    capture_mode._set_capture_lora_variant(None)


def test_the_second_variant_of_a_batch_size_takes_the_wrappers_of_the_first() -> None:
    backend, captured = Backend(), {}
    for bs in (8, 4):
        for variant in ("lora", "nolora"):
            capture_mode._set_capture_lora_variant(variant)
            captured[bs, variant] = backend.prepare(bs).decode_wrappers
    for bs in (8, 4):
        refreshed = backend.decode_cuda_graph_metadata[bs]
        assert captured[bs, "lora"] is refreshed
        assert captured[bs, "nolora"] is refreshed
    assert captured[8, "lora"] is not captured[4, "lora"]


def test_a_server_without_variants_is_left_alone() -> None:
    backend = Backend()
    first = backend.prepare(4).decode_wrappers
    assert backend.prepare(4).decode_wrappers is not first


def test_prefill_is_left_alone() -> None:
    backend = Backend()
    capture_mode._set_capture_lora_variant("nolora")
    assert backend.prepare(4, ForwardMode.EXTEND).decode_wrappers
    assert not backend.decode_cuda_graph_metadata


class Breakable(SimpleNamespace):
    """SGLang's backend of prefill graphs: a graph is what was to be applied at its capture."""

    def __init__(self) -> None:
        lora_backend = SimpleNamespace(batch_info="of this batch")
        manager = SimpleNamespace(lora_backend=lora_backend)
        super().__init__(_graphs={}, _model_runner=SimpleNamespace(lora_manager=manager))
        self.lora_backend = lora_backend

    def capture(self, size: int, label: str | None = None, *, fails: bool = False) -> None:
        def forward() -> Any:
            capturing = capture_mode.get_capture_lora_variant()
            assert not (fails and capturing), "no memory"
            return self.lora_backend.batch_info, capturing

        key, inputs, hook = ShapeKey(size, variant_label=label), f"inputs of {size}", forward
        capture_prefill(_capture_one, self, key, forward, inputs, hook)

    def replay(self, size: int, ids: list[str | None] | None, label: str | None = None) -> Any:
        batch = SimpleNamespace(lora_ids=ids)
        return replay_prefill(_replay, self, ShapeKey(size, variant_label=label), batch, more=size)


def _capture_one(
    self: Any, shape_key: ShapeKey, forward_fn: Any, capture_inputs: Any, hook: Any
) -> None:
    assert shape_key not in self._graphs
    assert (capture_inputs, hook) == (f"inputs of {shape_key.size}", forward_fn)
    self._graphs[shape_key] = forward_fn()


def _replay(self: Any, shape_key: ShapeKey, static_forward_batch: Any, *, more: int) -> Any:
    assert more == shape_key.size
    return self._graphs[shape_key]


WITH, WITHOUT = ("of this batch", None), (None, "nolora")


def test_a_short_prompt_of_the_base_model_replays_a_graph_without_adapters() -> None:
    backend = Breakable()
    for size in (BASE_PREFILL_ROWS + 1, BASE_PREFILL_ROWS, 4):
        backend.capture(size)
        assert backend.lora_backend.batch_info == "of this batch"
        assert capture_mode.get_capture_lora_variant() is None
    for size in (4, BASE_PREFILL_ROWS):
        assert backend.replay(size, [None, None]) == WITHOUT
        assert backend.replay(size, None) == WITHOUT
        assert backend.replay(size, [None, "a"]) == WITH
    assert backend.replay(BASE_PREFILL_ROWS + 1, [None]) == WITH, "too long for a graph of its own"


def test_variants_of_decode_graphs_are_left_alone() -> None:
    backend = Breakable()
    labels = ("lora", "nolora")
    for label in labels:
        capture_mode._set_capture_lora_variant(label)
        backend.capture(4, label)
    assert set(backend._graphs) == {ShapeKey(4, variant_label=label) for label in labels}
    for label in labels:
        captured = ("of this batch", label)
        assert backend.replay(4, [None], label) == captured, "what its own runner chose"


def test_a_capture_that_fails_leaves_the_batch_as_it_was() -> None:
    backend = Breakable()
    with pytest.raises(AssertionError, match="no memory"):
        backend.capture(4, fails=True)
    assert backend.lora_backend.batch_info == "of this batch"
    assert capture_mode.get_capture_lora_variant() is None


def test_no_adapter_is_recorded_for_the_base_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_mode, "is_capture_mode", True)
    assert is_recording_adapters()
    capture_mode._set_capture_lora_variant("nolora")
    assert not is_recording_adapters()


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rpartition(".")[2])
def test_targets_are_those_of_this_sglang(hook: Any) -> None:
    assert problem(hook, live=False) is None


def test_layers_begin_early_only_while_decode_graphs_are_captured() -> None:
    backend = SimpleNamespace(begun=0, batch_info=object())
    column = ColumnParallelLinearWithLoRA.__new__(ColumnParallelLinearWithLoRA)
    torch.nn.Module.__init__(column)
    column.base_layer = SimpleNamespace()
    manager = SimpleNamespace(lora_backend=backend, lora_modules=[{"model.layers.0.qkv": column}])
    runner = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
    seen: list[int] = []

    def capture(self: Any) -> None:
        assert self.record_nolora_graph
        capture_mode._set_capture_lora_variant("nolora")
        seen.append(len(column._forward_pre_hooks))
        backend.begun += 1

    capture_both(capture, runner)
    assert seen == [1]
    assert not column._forward_pre_hooks
    assert capture_mode.get_capture_lora_variant() is None
