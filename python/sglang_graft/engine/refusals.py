"""Flag combinations that Graft cannot serve exactly: refused at start with the flag named.

`check_requested` sees what the user asked for; `check_resolved` sees what SGLang made of it.
The table is also what `graft doctor` prints.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """One field of ServerArgs with the values that cannot be served."""

    field: str
    refused: Callable[[Any], bool]
    reason: str

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")


def _over_one(value: Any) -> bool:
    return value is not None and value > 1


def _given(value: Any) -> bool:
    return value not in (None, False, "none", "null")


def _other_than(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value not in allowed


_GRAPHS = {"decode": (None, "full", "disabled"), "prefill": (None, "breakable", "disabled")}


def _other_graphs(config: Any) -> bool:
    """Of the flag's JSON, or of SGLang's own object in a program: that tells what is no default."""
    asked = config if isinstance(config, dict) else config.to_dict() if config else {}
    return any(asked.get(phase, {}).get("backend") not in known for phase, known in _GRAPHS.items())


_NOT_TRIED = "the LoRA kernels were not tried under it"

REQUESTED = (
    Refusal("enable_lora", lambda value: value is False, "Graft is the LoRA path"),
    Refusal("lora_backend", _other_than("csgmv", "graft"), "Graft brings its own LoRA backend"),
    Refusal("radix_cache_backend", _other_than(None, "graft"), "Graft brings its own tree"),
    Refusal("tp_size", _over_one, "adapters are not sliced over ranks yet"),
    Refusal("pp_size", _over_one, "the arena holds the layers of one stage only"),
    Refusal("dp_size", _over_one, "each replica would need its own pool report"),
    Refusal("dcp_size", _over_one, "dense ids and decode context parallelism differ in page size"),
    Refusal(
        "page_size", lambda v: v is not None and not _is_page_size(v), "power of two, 16 to 64"
    ),
    Refusal("speculative_algorithm", _given, "draft tokens have no page table row"),
    Refusal("disaggregation_mode", _given, "KV transfer reads the stock layout"),
    Refusal("enable_hierarchical_cache", _given, "its host pool reads the stock layout"),
    Refusal("enable_hisparse", _given, "it needs its own allocator"),
    Refusal("enable_lmcache", _given, "it reads the stock layout"),
    Refusal("enable_flexkv", _given, "it reads the stock layout"),
    Refusal("enable_unified_memory", _given, "it moves pages; adapters are read by address"),
    Refusal("enable_page_major_kv_layout", _given, "the arena is page-major already"),
    Refusal("prefill_only_disable_kv_cache", _given, "the pool is the KV cache"),
    Refusal("enable_memory_saver", _given, "releasing the arena would lose adapter weights"),
    Refusal("enable_lora_overlap_loading", _given, "the pool loads adapters itself"),
    Refusal(
        "lora_eviction_policy",
        lambda value: value == "fifo",
        "--graft-policy chooses what leaves, also among adapters",
    ),
    Refusal("max_loaded_loras", _given, "reloads under new ids would lose an adapter's KV"),
    Refusal("enable_streaming_session", _given, "sessions hold pages outside the tree"),
    Refusal("enable_session_radix_cache", _given, "sessions hold pages outside the tree"),
    Refusal("strip_thinking_cache", _given, "it frees part of a request's pages"),
    Refusal("kv_events_config", _given, "the tree publishes no KV events yet"),
    Refusal("kv_canary", _given, "it patches the stock KV pool"),
    Refusal("dllm_algorithm", _given, "diffusion models reuse KV rows in place"),
    Refusal("enable_two_batch_overlap", _given, "a batch has one set of adapter groups"),
    # A result may then be seen before the launch of another forward that its request is part of,
    # and loads would not wait for that one (`Node.last_forward`).
    Refusal(
        "enable_mixed_chunk",
        _given,
        "loads into its pages could overtake a request's last forward; it fails on a CPU",
    ),
    Refusal("enable_pdmux", _given, "prefill and decode would share no stream order"),
    Refusal("elastic_ep_backend", _given, "experts carry no adapters"),
    Refusal("schedule_policy", lambda value: value == "dfs-weight", "it walks SGLang's own nodes"),
    Refusal("cuda_graph_backend_decode", _other_than(*_GRAPHS["decode"]), _NOT_TRIED),
    Refusal("cuda_graph_backend_prefill", _other_than(*_GRAPHS["prefill"]), _NOT_TRIED),
    Refusal("cuda_graph_config", _other_graphs, _NOT_TRIED),
    Refusal("debug_cuda_graph", _given, "it runs every operation outside of graphs"),
    Refusal("enable_torch_compile", _given, _NOT_TRIED),
    Refusal("tokenizer_worker_num", _over_one, "SGLang loads no plugins in tokenizer workers"),
)

_ATTENTION = ("flashinfer", "torch_native", "triton", "fa3")
_NOT_KNOWN = "not known to read a page-major arena through dense ids"

RESOLVED = (
    Refusal("grpc_port", _given, "its calls ask for no key, and for no adapter by its folder"),
    Refusal(
        "kv_cache_dtype",
        lambda value: value in ("fp4_e2m1", "mxfp8"),
        "scales would lie outside the page",
    ),
    Refusal("attention_backend", _other_than(*_ATTENTION), _NOT_KNOWN),
    Refusal("prefill_attention_backend", _other_than(None, *_ATTENTION), _NOT_KNOWN),
    Refusal("decode_attention_backend", _other_than(None, *_ATTENTION), _NOT_KNOWN),
    Refusal("page_size", lambda value: not _is_page_size(value), "power of two, 16 to 64"),
)


def _is_page_size(value: Any) -> bool:
    return value in (16, 32, 64)


def _check(rows: tuple[Refusal, ...], server_args: Any) -> None:
    for row in rows:
        value = getattr(server_args, row.field)
        if row.refused(value):
            raise ValueError(
                f"--enable-graft cannot be combined with {row.flag} {value!r}: {row.reason}."
                f" Leave {row.flag} out, or start without --enable-graft."
            )


def check_requested(server_args: Any) -> None:
    """Raise ValueError for a flag value that the user asked for and Graft cannot serve."""
    _check(REQUESTED, server_args)


def check_resolved(server_args: Any) -> None:
    """Raise ValueError for a value that SGLang chose and Graft cannot serve."""
    _check(RESOLVED, server_args)
