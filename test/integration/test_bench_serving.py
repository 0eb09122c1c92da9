"""The demo's model and adapters on a server without further flags, and SGLang's own benchmark."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import Request, Server, environment, serve
from reference import Reference, check
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_graft.cli.base_model import ensure_base_model

pytestmark = pytest.mark.server

FOLDERS = Path(__file__).parents[2] / "demo" / "adapters"
ADAPTERS = {folder.name: folder for folder in sorted(FOLDERS.iterdir())}
BENCHED = ("customer-service", "legal", "code-assistant")
PROMPTS = 12


@pytest.fixture(scope="module")
def small_model() -> Path:
    return ensure_base_model()


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    # This model is large enough to use the machine's cores, so let torch choose.
    with serve(small_model, folder, adapters=ADAPTERS, env={"OMP_NUM_THREADS": ""}) as running:
        yield running


def test_demo_adapters_answer_as_the_reference(server: Server, small_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    truth = Reference(model.eval(), ADAPTERS)
    text = "My parcel has not arrived yet. What can I do?"
    ids = AutoTokenizer.from_pretrained(small_model)(text)["input_ids"]
    requests = [Request(name, tuple(ids)) for name in (None, *ADAPTERS)]
    check(truth, requests, server.ask_all(requests, len(requests)))


def test_bench_serving_completes(server: Server, small_model: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.jsonl"
    line = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"]
    line += ["--base-url", server.url, "--model", str(small_model)]
    line += ["--dataset-name", "random-ids", "--num-prompts", str(PROMPTS)]
    line += ["--random-input-len", "24", "--random-output-len", "8"]
    line += ["--lora-name", *BENCHED, "--output-file", str(result), "--disable-tqdm"]
    bench = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    assert bench.returncode == 0, bench.stderr[-4000:]
    numbers = json.loads(result.read_text())
    assert numbers["completed"] == PROMPTS, bench.stdout[-4000:]
    assert numbers["total_output_tokens"] > 0
    used = {a["name"] for a in server.pool()["adapters"] if a["hits"]}
    assert used & set(BENCHED)
