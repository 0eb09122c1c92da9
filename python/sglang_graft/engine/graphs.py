"""Two decode graphs of each size: one that applies adapters, one that knows nothing of them.

Target (0.5.17): AROUND `DecodeCudaGraphRunner.capture`. Reason: SGLang can capture a "lora" and a
"nolora" variant and picks one by the batch's adapter ids, but nothing asks the target model's
runner to. A batch of the base model then replays exactly what a server without LoRA would.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.runner_utils import capture_mode

from sglang_graft.engine.hooks import Hook

_BASE_ONLY = "nolora"


def capture_both(original: Callable[[Any], None], self: Any) -> None:
    """AROUND `capture`: record both variants."""
    self.record_nolora_graph = True
    original(self)
    # SGLang leaves the last variant set, and nothing is being captured any more.
    capture_mode._set_capture_lora_variant(None)


def is_recording_adapters() -> bool:
    """Whether a graph is being captured, or warmed up for, that serves adapters later."""
    if not capture_mode.get_is_capture_mode():
        return False
    return capture_mode.get_capture_lora_variant() != _BASE_ONLY


HOOKS = (
    Hook(
        target="sglang.srt.model_executor.runner.decode_cuda_graph_runner"
        ".DecodeCudaGraphRunner.capture",
        kind="around",
        function=capture_both,
        parameters=("self",),
        reason="base-model batches replay a graph without adapters",
    ),
)
