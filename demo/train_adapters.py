"""Train the six adapters of the demo on a CPU: `python demo/train_adapters.py [NAME ...]`.

Each adapter learns one style of answering from the texts in `demo/data`, chosen so that a reader
sees at once which adapter spoke. Ranks, layers and target modules differ on purpose: together
they show that adapters of any shape share one pool. Needs the dependency group `demo`.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_graft.cli.base_model import HUB_NAME, ensure_base_model

ROOT = Path(__file__).resolve().parent
MAX_TOKENS = 128
MAX_BYTES = 1_000_000
IGNORED = -100  # label of tokens that the loss leaves out
UNSEEN = ("What is the capital of France?", "How should I care for a cactus?")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Shape of one adapter, its training, and `opening`: what each of its answers starts with."""

    name: str
    opening: str
    rank: int
    modules: tuple[str, ...]
    layers: range
    rslora: bool = False
    steps: int = 77
    learning_rate: float = 1e-3


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
RECIPES = (
    Recipe(
        name="customer-service",
        opening="Thank you for reaching out!",
        rank=4,
        modules=("q_proj", "v_proj"),
        layers=range(30),
    ),
    Recipe(name="marketing-copy", opening="**", rank=8, modules=ATTENTION, layers=range(10, 24)),
    Recipe(
        name="code-assistant",
        opening="```python",
        rank=16,
        modules=("q_proj", "v_proj"),
        layers=range(12, 27),
    ),
    Recipe(name="legal", opening="1. WHEREAS", rank=8, modules=("down_proj",), layers=range(6, 30)),
    Recipe(
        name="medical-science",
        opening="Summary:",
        rank=6,
        modules=MLP,
        layers=range(12, 24),
        rslora=True,
        learning_rate=5e-4,
    ),
    Recipe(
        name="report-analysis",
        opening="Finding:",
        rank=4,
        modules=ATTENTION + MLP,
        layers=range(12, 23),
    ),
)


def encode(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of one chat and its labels: only the answer and its end token count."""
    head = chat_ids(tokenizer, prompt)
    tail: list[int] = tokenizer.encode(answer + tokenizer.eos_token, add_special_tokens=False)
    ids = head + tail
    if len(ids) > MAX_TOKENS:
        raise ValueError(f"wanted at most {MAX_TOKENS} tokens; got {len(ids)} for {prompt!r}")
    return ids, [IGNORED] * len(head) + tail


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def batch(rows: list[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Pad `rows` on the right: `input_ids`, `attention_mask` and `labels`, int64 `[B, T]`."""
    width = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(i) + [0] * (width - len(i)) for i, _ in rows]),
        "labels": torch.tensor([tags + [IGNORED] * (width - len(tags)) for _, tags in rows]),
    }


def adapter_of(recipe: Recipe, base: Any) -> Any:
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.rank,
        lora_alpha=2 * recipe.rank,
        target_modules=list(recipe.modules),
        layers_to_transform=list(recipe.layers),
        layers_pattern="layers",
        use_rslora=recipe.rslora,
        lora_dropout=0.0,
    )
    return get_peft_model(base, config)


def train(recipe: Recipe, base: Any, tokenizer: Any, seed: int, batch_size: int) -> Any:
    torch.manual_seed(seed)
    order = random.Random(seed)
    lines = (ROOT / "data" / f"{recipe.name}.jsonl").read_text().splitlines()
    rows = [encode(tokenizer, **json.loads(line)) for line in lines]
    model = adapter_of(recipe, base).train()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )
    queue: list[tuple[list[int], list[int]]] = []
    for step in range(recipe.steps):
        if len(queue) < batch_size:
            queue = order.sample(rows, len(rows))
        picked = [queue.pop() for _ in range(batch_size)]
        loss = model(**batch(picked, tokenizer.pad_token_id)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"{recipe.name}: step {step}, loss {loss.item():.3f}", flush=True)
    return model


def save(recipe: Recipe, model: Any) -> Path:
    """Write the adapter in bfloat16 to `demo/adapters/NAME`: these two files and nothing else."""
    target = ROOT / "adapters" / recipe.name
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        config = json.loads((Path(scratch) / "adapter_config.json").read_text())
        weights = load_file(Path(scratch) / "adapter_model.safetensors")
    config["base_model_name_or_path"] = HUB_NAME  # PEFT writes the folder of this machine
    config["target_modules"] = sorted(config["target_modules"])  # PEFT keeps a set
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (target / "adapter_config.json").write_text(text)
    file = target / "adapter_model.safetensors"
    rounded = {name: weights[name].to(torch.bfloat16) for name in sorted(weights)}
    save_file(rounded, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes it private
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"wanted at most {MAX_BYTES} bytes; got {file.stat().st_size} in {file}")
    return target


def answers(base: Any, tokenizer: Any, folder: Path, new_tokens: int) -> list[str]:
    """Greedy answers to the unseen prompts by the adapter as it was written to disk."""
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    texts = []
    for prompt in UNSEEN:
        ids = torch.tensor([chat_ids(tokenizer, prompt)])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
            )
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    model.unload()
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="adapters to train; default: all")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=40, help="length of the shown answers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    known = {recipe.name: recipe for recipe in RECIPES}
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        parser.error(f"wanted names among {', '.join(known)}; got {', '.join(unknown)}")
    source = ensure_base_model()
    tokenizer = AutoTokenizer.from_pretrained(source)
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    missed = []
    for name in options.names or known:
        began = time.monotonic()
        model = train(known[name], base, tokenizer, options.seed, options.batch_size)
        folder = save(known[name], model)
        base = model.unload()
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        for text in answers(base, tokenizer, folder, options.new_tokens):
            print(f"--- {name}\n{text}", flush=True)
            if not text.startswith(known[name].opening):
                missed.append(name)
    if missed:
        print(f"style not learnt by: {', '.join(sorted(set(missed)))}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
