"""Two decode graphs of each size: one that applies adapters, one that knows nothing of them.

Target (0.5.17): AROUND `DecodeCudaGraphRunner.capture`. Reason: SGLang can capture a "lora" and a
"nolora" variant and picks one by the batch's adapter ids, but nothing asks the target model's
runner to. A batch of the base model then replays exactly what a server without LoRA would.

Target (0.5.17): AROUND `FlashInferAttnBackend._prepare_cuda_graph_metadata`. Reason: FlashInfer's
backend makes new wrappers for each capture and keeps the last of each batch size. The graph that
was captured first would go on reading the plan and the workspace of wrappers that nobody plans
and that are freed: wrong attention at first, illegal addresses later. So both variants share one.
The Triton and FA3 backends keep one set of buffers for all captures.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.attention.flashinfer_backend import DecodeMetadata
from sglang.srt.model_executor.runner_utils import capture_mode

from sglang_graft.engine import early_shrink
from sglang_graft.engine.hooks import Hook

_BASE_ONLY = "nolora"


def capture_both(original: Callable[[Any], None], self: Any) -> None:
    """AROUND `capture`: record both variants."""
    self.record_nolora_graph = True
    original(self)
    # SGLang leaves the last variant set, and nothing is being captured any more.
    capture_mode._set_capture_lora_variant(None)
    manager = self.model_runner.lora_manager
    early_shrink.check(manager.lora_backend, manager.early_layers)


def is_recording_adapters() -> bool:
    """Whether a graph is being captured, or warmed up for, that serves adapters later."""
    if not capture_mode.get_is_capture_mode():
        return False
    return capture_mode.get_capture_lora_variant() != _BASE_ONLY


def share_wrappers(
    original: Callable[..., None],
    self: Any,
    bs: int,
    num_tokens: int,
    forward_mode: Any,
    spec_info: Any,
) -> None:
    """AROUND `_prepare_cuda_graph_metadata`: the second variant takes the wrappers of the first."""
    if forward_mode.is_decode_or_idle() and capture_mode.get_capture_lora_variant() == _BASE_ONLY:
        self.forward_metadata = DecodeMetadata(self.decode_cuda_graph_metadata[bs])
        return
    original(self, bs, num_tokens, forward_mode, spec_info)


HOOKS = (
    Hook(
        target="sglang.srt.model_executor.runner.decode_cuda_graph_runner"
        ".DecodeCudaGraphRunner.capture",
        kind="around",
        function=capture_both,
        parameters=("self",),
        reason="base-model batches replay a graph without adapters",
    ),
    Hook(
        target="sglang.srt.layers.attention.flashinfer_backend"
        ".FlashInferAttnBackend._prepare_cuda_graph_metadata",
        kind="around",
        function=share_wrappers,
        parameters=("self", "bs", "num_tokens", "forward_mode", "spec_info"),
        reason="both graphs of a batch size read the attention plan that is refreshed",
    ),
)
