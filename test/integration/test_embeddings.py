"""Embeddings of a causal model with adapters (--is-embedding) on a real server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny_model
import torch
from harness import STRICT, Server, serve
from reference import Reference

pytestmark = pytest.mark.server

BASE = "served"
NAMES = ["all-r16", "dora-r8", "bias-r6", "patterns", "q-r4", "bf16"]
CLOSE = 2e-4
"""In each entry of a vector of length 1, float32 over the tiny model."""
PAGE_TOKENS, POOL_PAGES = 16, 48  # fewer than all adapters together and their KV need
PROMPTS = [tiny_model.prompt(length, seed=length) for length in (3, 40, 100)]


@pytest.fixture(scope="module")
def server(
    base_model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ("--is-embedding", "--served-model-name", BASE, "--page-size", str(PAGE_TOKENS))
    flags += ("--max-total-tokens", str(POOL_PAGES * PAGE_TOKENS))
    given = {name: adapters[name] for name in NAMES}
    folder = tmp_path_factory.mktemp("embeddings")
    with serve(base_model, folder, *flags, adapters=given, env=STRICT) as running:
        yield running


def is_close(reference: Reference, name: str | None, prompt: Any, got: list[float]) -> bool:
    wanted = reference.embedding(name, prompt)
    return bool((torch.tensor(got) - wanted).abs().max() < CLOSE)


def test_each_adapter_has_its_own_vectors(server: Server, reference: Reference) -> None:
    """Twice: the second time the prefix is cached, and some adapters had to come back."""
    vectors = {}
    for _ in range(2):
        for name in (None, *NAMES):
            for prompt in PROMPTS:
                body = {"model": name or BASE, "input": list(prompt)}
                answer = server.post("/v1/embeddings", body)
                assert answer.status_code == 200, answer.text
                (row,) = answer.json()["data"]
                assert is_close(reference, name, prompt, row["embedding"]), (name, len(prompt))
                vectors[name, prompt] = row["embedding"]
    loads = {row["name"]: row["loads"] for row in server.pool()["adapters"]}
    assert sum(loads.values()) > len(NAMES), "none had to leave: the pool is too large"
    for prompt in PROMPTS:
        told_apart = {tuple(round(x, 3) for x in vectors[name, prompt]) for name in (None, *NAMES)}
        assert len(told_apart) == 1 + len(NAMES)


def test_the_ways_to_name_an_adapter(server: Server, reference: Reference) -> None:
    prompt, name = PROMPTS[1], "patterns"
    text = " ".join(map(tiny_model.word, prompt))
    for path, body in (
        ("/v1/embeddings", {"model": f"{BASE}:{name}", "input": text}),
        ("/v1/embeddings", {"model": BASE, "lora_path": name, "input": text}),
        ("/v1/embeddings", {"model": BASE, "lora_name": name, "input": text}),
        ("/encode", {"text": text, "lora_path": name}),
        ("/encode", {"text": text, "model": name}),
        ("/classify", {"text": text, "lora_path": name}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        got = found["data"][0]["embedding"] if "data" in found else found["embedding"]
        assert is_close(reference, name, prompt, got), (path, body)
    unknown = server.post("/v1/embeddings", {"model": "nobody", "input": "w1"})
    assert unknown.status_code == 404
    assert name in unknown.text


def test_the_openai_client_and_a_batch(server: Server, reference: Reference) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        made = client.embeddings.create(
            model="q-r4", input=[list(p) for p in PROMPTS], encoding_format="float"
        )
    assert made.model == "q-r4"
    for prompt, row in zip(PROMPTS, made.data, strict=True):
        assert is_close(reference, "q-r4", prompt, row.embedding)
    names = ["all-r16", None, "q-r4"]
    body = {"input_ids": [list(prompt) for prompt in PROMPTS], "lora_path": names}
    answer = server.post("/encode", body)
    assert answer.status_code == 200, answer.text
    for prompt, name, row in zip(PROMPTS, names, answer.json(), strict=True):
        assert is_close(reference, name, prompt, row["embedding"]), name


def test_an_adapter_is_loaded_and_replaced(
    server: Server, adapters: dict[str, Path], reference: Reference
) -> None:
    prompt = PROMPTS[2]
    for kind, inplace in (("rslora-r8", False), ("all-r16", True)):
        loaded = server.load("fresh", adapters[kind], load_inplace=inplace)
        assert loaded.status_code == 200, loaded.text
        answer = server.post("/v1/embeddings", {"model": "fresh", "input": list(prompt)})
        (row,) = answer.json()["data"]
        assert is_close(reference, kind, prompt, row["embedding"]), kind
    assert server.unload("fresh").status_code == 200
    gone = server.post("/v1/embeddings", {"model": "fresh", "input": list(prompt)})
    assert gone.status_code == 404


def test_generation_is_refused_and_nothing_is_left(server: Server) -> None:
    """Each of these would end the scheduler: SGLang looks for embeddings in logits."""
    chat = [{"role": "user", "content": "w1"}]
    for name in ("q-r4", None):
        model = name or BASE
        for path, body in (
            ("/generate", {"text": "w1", "lora_path": name}),
            ("/generate", {"text": ["w1", "w2"], "lora_path": [name, name]}),
            ("/v1/completions", {"model": model, "prompt": "w1"}),
            ("/v1/chat/completions", {"model": model, "messages": chat}),
            ("/v1/messages", {"model": model, "messages": chat, "max_tokens": 2}),
        ):
            answer = server.post(path, body)
            assert answer.status_code == 400, (path, answer.text)
            assert "--is-embedding" in answer.text
    streamed = server.post("/generate", {"text": "w1", "stream": True})
    assert "--is-embedding" in streamed.text
    assert server.post("/v1/embeddings", {"model": "q-r4", "input": "w1"}).status_code == 200
    server.settle()
    server.flush()
    pool = server.pool()
    assert pool["pages"]["free"] == pool["pages"]["total"]
