"""Token ids of a client must be in the vocabulary.

Target (0.5.17): BEFORE `TokenizerManager._validate_one_request`. Reason: SGLang looks an id up in
the embedding whatever it is; one id out of range ends the scheduler, and with it every request.
"""

from typing import Any

from sglang_graft.engine.hooks import Hook


def check_token_ids(self: Any, obj: Any, input_ids: Any) -> None:
    """BEFORE `_validate_one_request`: ValueError for the first id that is out of range."""
    if obj.input_ids is None or not input_ids:
        return  # the tokenizer's own ids
    size = self.model_config.vocab_size
    if min(input_ids) < 0 or max(input_ids) >= size:
        bad = next(token for token in input_ids if not 0 <= token < size)
        raise ValueError(f"input_ids: wanted token ids from 0 to {size - 1}, got {bad}")


HOOKS = (
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        kind="before",
        function=check_token_ids,
        parameters=("self", "obj", "input_ids"),
        reason="a wrong token id is an error of its request alone",
    ),
)
