"""Two graphs of each size: one that applies adapters, one that knows nothing of them.

Target (0.5.17): AROUND `DecodeCudaGraphRunner.capture`. Reason: SGLang can capture a "lora" and a
"nolora" variant and picks one by the batch's adapter ids, but nothing asks the target model's
runner to. A batch of the base model then replays exactly what a server without LoRA would.

Target (0.5.17): AROUND `FlashInferAttnBackend._prepare_cuda_graph_metadata`. Reason: FlashInfer's
backend makes new wrappers for each capture and keeps the last of each batch size. The graph that
was captured first would go on reading the plan and the workspace of wrappers that nobody plans
and that are freed: wrong attention at first, illegal addresses later. So both variants share one.
The Triton and FA3 backends keep one set of buffers for all captures.

Targets (0.5.17): AROUND `BreakableCudaGraphBackend.capture_one` and `replay`. Reason: SGLang knows
no variants of prefill graphs, so prompts of the base model would launch all kernels for adapters,
on an empty batch. That is two launches a projection, whatever the rows: where a prompt is short,
they are a part of its first token that can be seen.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang.srt.layers.attention.flashinfer_backend import DecodeMetadata
from sglang.srt.model_executor.runner_utils import capture_mode

from sglang_graft.engine import early_shrink
from sglang_graft.engine.hooks import Hook

_BASE_ONLY = "nolora"
BASE_PREFILL_ROWS = 512
"""The largest prefill graph that is captured for the base model too. Each takes time at the start,
and memory; longer prompts take so long that empty launches are no part of it."""


def capture_both(original: Callable[[Any], None], self: Any) -> None:
    """AROUND `capture`: record both variants."""
    self.record_nolora_graph = True
    manager = self.model_runner.lora_manager
    layers = (layer for modules in manager.lora_modules for layer in modules.values())
    with early_shrink.early(manager.lora_backend, layers):
        original(self)
    # SGLang leaves the last variant set, and nothing is being captured any more.
    capture_mode._set_capture_lora_variant(None)


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


def capture_prefill(
    original: Callable[..., None],
    self: Any,
    shape_key: Any,
    forward_fn: Callable[[], Any],
    capture_inputs: Any = None,
    post_warmup_hook: Any = None,
) -> None:
    """AROUND `BreakableCudaGraphBackend.capture_one`: once more for the base model, if small.

    Decode graphs, which this backend can record too, come with the label of their variant.
    """
    original(self, shape_key, forward_fn, capture_inputs, post_warmup_hook)
    if shape_key.variant_label is not None or shape_key.size > BASE_PREFILL_ROWS:
        return
    lora_backend = self._model_runner.lora_manager.lora_backend
    described, lora_backend.batch_info = lora_backend.batch_info, None
    capture_mode._set_capture_lora_variant(_BASE_ONLY)
    try:
        key = replace(shape_key, variant_label=_BASE_ONLY)
        original(self, key, forward_fn, capture_inputs, post_warmup_hook)
    finally:
        capture_mode._set_capture_lora_variant(None)
        lora_backend.batch_info = described


def replay_prefill(
    original: Callable[..., Any], self: Any, shape_key: Any, static_forward_batch: Any, **rest: Any
) -> Any:
    """AROUND `BreakableCudaGraphBackend.replay`: what fits a batch of the base model, if it is."""
    if shape_key.variant_label is None and not any(static_forward_batch.lora_ids or ()):
        key = replace(shape_key, variant_label=_BASE_ONLY)
        shape_key = key if key in self._graphs else shape_key
    return original(self, shape_key, static_forward_batch, **rest)


_BREAKABLE = (
    "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend"
    ".BreakableCudaGraphBackend"
)

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
    Hook(
        target=f"{_BREAKABLE}.capture_one",
        kind="around",
        function=capture_prefill,
        parameters=("self", "shape_key", "forward_fn", "capture_inputs", "post_warmup_hook"),
        reason="short prompts of the base model replay a graph without adapters",
    ),
    Hook(
        target=f"{_BREAKABLE}.replay",
        kind="around",
        function=replay_prefill,
        parameters=("self", "shape_key", "static_forward_batch", "kwargs"),
        reason="short prompts of the base model replay a graph without adapters",
    ),
)
