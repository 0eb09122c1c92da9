"""What transformers and PEFT answer in float32, greedily: the truth of the integration tests."""

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Request
from tiny_adapters import quiet

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

TIE = 1e-3
"""Logits closer than this may be ordered either way by another order of additions."""


LOGPROB = 2e-4
"""Log-probabilities of equal tokens may differ by this much, in float32 over the tiny models."""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, by how much each one led the second-best, and its log-probability."""

    tokens: list[int]
    margins: list[float]
    logprobs: list[float]


class Reference:
    """Greedy answers of the base model and its adapters, each computed once."""

    def __init__(self, base: torch.nn.Module, adapters: dict[str, Path]) -> None:
        self._lock = threading.Lock()  # one adapter at a time is the model's
        self._answers: dict[tuple[str | None, tuple[int, ...]], Answer] = {}
        (first, folder), *rest = adapters.items()
        with quiet():
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
        cut = slice(new_tokens)
        return Answer(known.tokens[cut], known.margins[cut], known.logprobs[cut])

    def prompt_logprobs(self, adapter: str | None, prompt: tuple[int, ...]) -> list[float]:
        """Log-probability of each token of `prompt` but the first, given those before it."""
        with self._lock, torch.inference_mode(), self._as(adapter):
            logits = self._model(input_ids=torch.tensor([prompt])).logits[0, :-1].float()
        following = torch.tensor(prompt[1:])[:, None]
        found: list[float] = logits.log_softmax(-1).gather(1, following)[:, 0].tolist()
        return found

    def embedding(self, adapter: str | None, prompt: tuple[int, ...]) -> torch.Tensor:
        """Last hidden state of the last token after the final norm, `[hidden]`, of length 1."""
        with self._lock, torch.inference_mode(), self._as(adapter):
            ids = torch.tensor([prompt])
            states = self._model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
            return torch.nn.functional.normalize(states[0, -1].float(), dim=-1)

    @contextmanager
    def _as(self, adapter: str | None) -> Iterator[None]:
        if adapter is None:
            with self._model.disable_adapter():
                yield
        else:
            self._model.set_adapter(adapter)
            yield

    @torch.inference_mode()
    def _compute(self, adapter: str | None, prompt: tuple[int, ...], new_tokens: int) -> Answer:
        with self._as(adapter):
            return self._greedy(prompt, new_tokens)

    def _greedy(self, prompt: tuple[int, ...], new_tokens: int) -> Answer:
        tokens: list[int] = []
        margins: list[float] = []
        logprobs: list[float] = []
        ids, cache = torch.tensor([prompt]), None
        for _ in range(new_tokens):
            out = self._model(input_ids=ids, past_key_values=cache, use_cache=True)
            best = torch.topk(out.logits[0, -1].float().log_softmax(-1), 2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            logprobs.append(float(best.values[0]))
            ids, cache = torch.tensor([tokens[-1:]]), out.past_key_values
        return Answer(tokens, margins, logprobs)


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


def same_tokens(got: list[int], wanted: Answer) -> int:
    """How many tokens from the first on are the same."""
    pairs = zip(got, wanted.tokens, strict=True)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(got))


def check_logprobs(
    reference: Reference, requests: Sequence[Request], answers: Sequence[dict[str, Any]]
) -> float:
    """Assert that all log-probabilities are the reference's; the largest difference.

    The requests have to be made with `logprobs=True`. Compares every token of the prompt but the
    first, and those of the answer as far as its tokens are the same.
    """
    largest = 0.0
    for request, answer in zip(requests, answers, strict=True):
        meta = answer["meta_info"]
        wanted = reference.answer(request.adapter, request.prompt, request.new_tokens)
        count = same_tokens(answer["output_ids"], wanted)
        ours = [entry[0] for entry in meta["input_token_logprobs"][1:]]
        ours += [entry[0] for entry in meta["output_token_logprobs"][:count]]
        theirs = reference.prompt_logprobs(request.adapter, request.prompt)
        theirs = theirs + wanted.logprobs[:count]
        differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        assert max(differences) < LOGPROB, (
            f"{request.adapter}, {len(request.prompt)} tokens: log-probabilities differ by "
            f"{max(differences)} at token {differences.index(max(differences)) + 1}"
        )
        largest = max(largest, *differences)
    return largest


def check(
    reference: Reference, requests: Sequence[Request], answers: Sequence[dict[str, Any]]
) -> None:
    """Assert that every answer of a server is the reference's."""
    for request, answer in zip(requests, answers, strict=True):
        wanted = reference.answer(request.adapter, request.prompt, request.new_tokens)
        found = difference(answer["output_ids"], wanted)
        assert found is None, f"{request.adapter}, {len(request.prompt)} tokens: {found}"
