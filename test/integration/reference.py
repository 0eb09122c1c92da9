"""What transformers and PEFT answer in float32, greedily: the truth of the integration tests."""

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Request

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

TIE = 1e-3
"""Logits closer than this may be ordered either way by another order of additions."""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and by how much each one led the second-best."""

    tokens: list[int]
    margins: list[float]


class Reference:
    """Greedy answers of the base model and its adapters, each computed once."""

    def __init__(self, base: torch.nn.Module, adapters: dict[str, Path]) -> None:
        self._lock = threading.Lock()  # one adapter at a time is the model's
        self._answers: dict[tuple[str | None, tuple[int, ...]], Answer] = {}
        (first, folder), *rest = adapters.items()
        self._model = peft.PeftModel.from_pretrained(base, folder, first)
        for name, path in rest:
            self._model.load_adapter(path, name)
        self._model.eval()

    def answer(self, adapter: str | None, prompt: tuple[int, ...], new_tokens: int) -> Answer:
        """The next `new_tokens` tokens behind `prompt`; `adapter` None is the base model."""
        key = (adapter, prompt)
        with self._lock:
            known = self._answers.get(key)
            if known is None or len(known.tokens) < new_tokens:
                known = self._answers[key] = self._compute(adapter, prompt, new_tokens)
        return Answer(known.tokens[:new_tokens], known.margins[:new_tokens])

    @torch.inference_mode()
    def _compute(self, adapter: str | None, prompt: tuple[int, ...], new_tokens: int) -> Answer:
        if adapter is None:
            with self._model.disable_adapter():
                return self._greedy(prompt, new_tokens)
        self._model.set_adapter(adapter)
        return self._greedy(prompt, new_tokens)

    def _greedy(self, prompt: tuple[int, ...], new_tokens: int) -> Answer:
        tokens: list[int] = []
        margins: list[float] = []
        ids, cache = torch.tensor([prompt]), None
        for _ in range(new_tokens):
            out = self._model(input_ids=ids, past_key_values=cache, use_cache=True)
            best = torch.topk(out.logits[0, -1].float(), 2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            ids, cache = torch.tensor([tokens[-1:]]), out.past_key_values
        return Answer(tokens, margins)


def difference(got: list[int], wanted: Answer) -> str | None:
    """Why `got` is another answer than `wanted`, or None. What follows a tie is not compared."""
    if len(got) != len(wanted.tokens):
        return f"wanted {len(wanted.tokens)} tokens, got {len(got)}"
    for place, (ours, theirs) in enumerate(zip(got, wanted.tokens, strict=True)):
        if ours != theirs:
            margin = wanted.margins[place]
            if margin < TIE:
                return None
            return f"token {place} is {ours}, wanted {theirs} (leads by {margin:.4f})"
    return None


def check(
    reference: Reference, requests: Sequence[Request], answers: Sequence[dict[str, Any]]
) -> None:
    """Assert that every answer of a server is the reference's."""
    for request, answer in zip(requests, answers, strict=True):
        wanted = reference.answer(request.adapter, request.prompt, request.new_tokens)
        found = difference(answer["output_ids"], wanted)
        assert found is None, f"{request.adapter}, {len(request.prompt)} tokens: {found}"
