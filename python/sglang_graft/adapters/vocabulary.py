"""Tokens that an adapter adds to the vocabulary, which a shared base model cannot have."""

import os
from pathlib import Path

from sglang_graft.adapters.errors import AdapterError, show
from sglang_graft.adapters.files import read_json_object
from sglang_graft.adapters.spec import ModelSpec

TOKENS_NAME = "added_tokens.json"


def refuse_new_tokens(folder: Path, spec: ModelSpec) -> None:
    """Raise AdapterError when `added_tokens.json` holds an id that the base model has no row for.

    Trainers copy the base tokenizer beside the adapter, so ids inside the vocabulary are not new.
    """
    file = folder / TOKENS_NAME
    if spec.vocab_size is None or not os.path.isfile(file):
        return
    for token, number in read_json_object(file).items():
        if not isinstance(number, int) or number >= spec.vocab_size:
            raise AdapterError(
                file, show(token), f"wanted an id below {spec.vocab_size}, got {show(number)}"
            )
