"""Both decode graphs of a batch size read the attention plan that is refreshed."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_utils import capture_mode

from sglang_graft.engine.graphs import share_wrappers


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
