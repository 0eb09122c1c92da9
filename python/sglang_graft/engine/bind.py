"""Join the LoRA side to the arena.

Target (0.5.17): AFTER `ModelRunner.alloc_memory_pool`. Reason: SGLang builds the LoRA manager
before the KV pool and captures graphs before the tree cache, so this is the one moment at which
both sides exist and nothing has read an adapter yet.
"""

from typing import Any

from sglang_graft.engine.hooks import Hook
from sglang_graft.engine.lora_manager import GraftLoRAManager
from sglang_graft.engine.pool import get_pool


def bind_adapters(result: None, self: Any, memory_pool_config: Any = None) -> None:
    """AFTER `alloc_memory_pool`."""
    manager = self.lora_manager
    assert isinstance(manager, GraftLoRAManager), f"the LoRA manager is {type(manager).__name__}"
    manager.bind(get_pool())


HOOKS = (
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.alloc_memory_pool",
        kind="after",
        function=bind_adapters,
        parameters=("self", "memory_pool_config"),
        reason="adapters named at start are registered once the arena exists",
    ),
)
