"""Checks of a request that SGLang leaves out.

Targets (0.5.17):
- BEFORE `TokenizerManager._validate_one_request`: SGLang looks a client's token id up in the
  embedding whatever it is; one id out of range ends the scheduler, and with it every request; so
  does a request to generate, on a server with `--is-embedding`;
- BEFORE `TokenizerManager._init_req_state`: a list of adapters that is shorter than the batch is an
  IndexError there, which a client sees as 500.
"""

from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_graft.engine.hooks import Hook


def check_one(self: Any, obj: Any, input_ids: Any) -> None:
    """BEFORE `_validate_one_request`: ValueError for what the model does not do, and for the first
    id that is out of range."""
    if isinstance(obj, GenerateReqInput) and not self.is_generation:
        raise ValueError(
            "This server was started with --is-embedding and generates nothing; wanted"
            " /v1/embeddings, /encode or /classify."
        )
    if obj.input_ids is None or not input_ids:
        return  # the tokenizer's own ids
    size = self.model_config.vocab_size
    if min(input_ids) < 0 or max(input_ids) >= size:
        bad = next(token for token in input_ids if not 0 <= token < size)
        raise ValueError(f"input_ids: wanted token ids from 0 to {size - 1}, got {bad}")


def check_adapter_list(self: Any, obj: Any, request: Any = None, lifecycle_id: Any = None) -> None:
    """BEFORE `_init_req_state`: ValueError unless there is one adapter for each sample."""
    names = getattr(obj, "lora_path", None)
    if not isinstance(names, list):
        return
    wanted = getattr(obj, "batch_size", 1) * getattr(obj, "parallel_sample_num", 1)
    if len(names) != wanted:
        raise ValueError(
            f"lora_path: wanted one name for each of {wanted} samples, got {len(names)}"
        )


HOOKS = (
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        kind="before",
        function=check_one,
        parameters=("self", "obj", "input_ids"),
        reason="a wrong token id, or a wrong kind of request, is an error of its request alone",
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state",
        kind="before",
        function=check_adapter_list,
        parameters=("self", "obj", "request", "lifecycle_id"),
        reason="a list of adapters of another length is refused before anything happens",
    ),
)
