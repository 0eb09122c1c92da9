"""Entry point `sglang.srt.platforms: graft_cpu`: the unmodified SGLang server on any CPU.

Seam (0.5.17): out-of-tree platforms. Reason: SGLang's own CPU mode (SGLANG_USE_CPU_ENGINE=1) needs
the CPU build of sgl-kernel, which few machines have. An out-of-tree platform makes SGLang dispatch
its operators to their plain torch forms. Inactive wherever an accelerator is found, or where that
variable asks for SGLang's own mode.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

_MEMORY_FRACTION = 0.5


def _accelerator() -> bool:
    return (
        torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available()
    )


def platform_class() -> str | None:
    """The class that SGLang shall use, or None where this platform must stay away."""
    if _accelerator() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return f"{__name__}.{GraftCpuPlatform.__name__}"


class GraftCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU devices under SGLang's out-of-tree rules."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Choose what runs on a CPU, where the user chose nothing."""
        if server_args.attention_backend in (None, "intel_amx"):
            # SGLang names intel_amx for every x86 CPU; it is part of the sgl-kernel CPU build.
            server_args.attention_backend = "torch_native"
        server_args.sampling_backend = "pytorch"
        if server_args.dtype == "auto":
            # Without bf16 instructions a bf16 product is several times slower than a float32 one.
            server_args.dtype = "float32"
        # The idle scheduler would otherwise spin and starve the HTTP process beside it.
        server_args.sleep_on_idle = True
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = _MEMORY_FRACTION

    def get_device(self, local_rank: int | None = None) -> str:
        """As text: SGLang splits an index off it."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        """Attention in plain torch."""
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        """SGLang's own pool; Graft's hook replaces it where Graft is on."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        pool: type = MHATokenToKVPool
        return pool

    def get_paged_allocator_cls(self) -> type:
        """An allocator for single tokens: SGLang's paged one needs Triton."""
        from sglang_graft.engine.cpu_allocator import CpuTokenAllocator

        return CpuTokenAllocator

    def get_dispatch_key_name(self) -> str:
        """Operators run in their plain torch form."""
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        """What /start_profile records. Without it that route ends the scheduler."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """The same, as torch names it."""
        return torch.profiler.ProfilerActivity.CPU

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """No device copies from host memory here."""
        return False

    def init_backend(self) -> None:
        """Each worker: make `pin_memory` a no-op, and let grammars mask logits."""
        ignore_pin_memory()
        mask_logits_on_cpu()


def ignore_pin_memory() -> None:
    """Let torch ignore requests for pinned memory in this process.

    SGLang's LoRA layers pin their offsets always, and torch raises where no accelerator is.
    """
    for name in ("tensor", "empty", "zeros", "ones", "full"):
        factory = getattr(torch, name)
        if not hasattr(factory, "graft_unpinned"):
            setattr(torch, name, _without_pin(factory))
    torch.Tensor.pin_memory = _same  # type: ignore[method-assign, assignment]


def _without_pin(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def unpinned(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    unpinned.graft_unpinned = True  # type: ignore[attr-defined]
    return unpinned


def _same(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    return self


def mask_logits_on_cpu() -> None:
    """Let SGLang's default grammar backend work: its own masking is a Triton kernel.

    Without this the first request with a JSON schema or a regular expression ends the server.
    """
    import xgrammar
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    def apply_vocab_mask(self: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)

    XGrammarGrammar.apply_vocab_mask = apply_vocab_mask
