"""Do Graft and stock SGLang give the same greedy tokens? The correctness gate of every comparison.

    python benchmark/serving/gate_tokens.py --model BASE --adapters DIR DIR ... [--json OUT]
        [--server-args="--attention-backend flashinfer"] [--stock-args="..."] [--graft-args="..."]

Starts stock SGLang, then Graft, on the same files. Each answers the same seeded prompts (token ids)
for the base model and every adapter: one by one, again (prefix hits), and all at once. Where two
runs part, the gap between stock's two best log-probabilities there says whether it was a tie. In
bf16 on a random model most sequences end in a tie; so the yardstick is stock against itself: the
same requests, answered again from its own prefix cache and all at once.

What this does not show: adapters whose scale stock computes otherwise than PEFT (rsLoRA, rank and
alpha patterns), speed, and anything about a trained model's text.
"""

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

PROMPT_LENGTHS = (5, 64, 1500)
START_SECONDS = 600
Answer = dict[str, Any]


def answer(port: int, name: str | None, prompt: list[int], tokens: int) -> Answer:
    """Greedy token ids of one request, and the two best log-probabilities of each step."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
        **({"lora_path": name} if name else {}),
    }
    reply = httpx.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=600).json()
    meta = reply["meta_info"]
    best = [[entry[0] for entry in step] for step in meta["output_top_logprobs"]]
    return {
        "name": name,
        "length": len(prompt),
        "ids": reply["output_ids"],
        "best": best,
        "cached": meta["cached_tokens"],
    }


def ask_all(port: int, names: list[str], vocabulary: int, tokens: int) -> dict[str, list[Answer]]:
    """The same requests one by one, again, and all at once."""
    source = random.Random(0)
    prompts = [[source.randrange(10, vocabulary) for _ in range(n)] for n in PROMPT_LENGTHS]
    requests = [(name, prompt) for name in (None, *names) for prompt in prompts]

    def one(request: tuple[str | None, list[int]]) -> Answer:
        return answer(port, *request, tokens)

    with ThreadPoolExecutor(len(requests)) as threads:
        return {
            "alone": list(map(one, requests)),
            "again": list(map(one, requests)),
            "at once": list(threads.map(one, requests)),
        }


def parted_at(one: Answer, other: Answer) -> int | None:
    """The first step at which two answers differ."""
    steps = enumerate(zip(one["ids"], other["ids"], strict=True))
    return next((step for step, (a, b) in steps if a != b), None)


def compare(left: list[Answer], right: list[Answer]) -> dict[str, Any]:
    """How many answers agree, how wide the gaps are where they part, and how far scores differ."""
    gaps, differences = [], []
    for one, other in zip(left, right, strict=True):
        step = parted_at(one, other)
        if step is not None:
            gaps.append(one["best"][step][0] - one["best"][step][1])
        common = list(zip(one["best"], other["best"], strict=True))[:step]
        differences += [abs(a[0] - b[0]) for a, b in common]
    return {
        "equal": len(left) - len(gaps),
        "of": len(left),
        "largest_gap_where_they_part": max(gaps, default=0.0),
        "mean_logprob_difference": sum(differences) / max(len(differences), 1),
        "steps": len(differences),
    }


def serve(port: int, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a server and wait until it answers; SystemExit with the end of its log otherwise."""
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).status_code == 200:
                return process
        except httpx.TransportError:
            pass
        time.sleep(1)
    stop(process)
    raise SystemExit(f"{shlex.join(command)} did not start:\n{log.read_text()[-4000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and everything that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Both servers, one after the other, and the comparison."""
    names = {path.name: path for path in options.adapters}
    common = ["--model-path", str(options.model), "--skip-server-warmup", "--lora-paths"]
    common += [f"{name}={path}" for name, path in names.items()]
    common += shlex.split(options.server_args)
    sides = {
        "stock": shlex.split(options.stock_args),
        "graft": ["--enable-graft", *shlex.split(options.graft_args)],
    }
    answers = {}
    for number, (side, extra) in enumerate(sides.items()):
        with tempfile.TemporaryDirectory() as folder:
            port = options.port + number
            process = serve(port, [*common, *extra], Path(folder, "log"))
            try:
                answers[side] = ask_all(port, list(names), options.vocabulary, options.tokens)
            finally:
                stop(process)
    stock, graft = answers["stock"], answers["graft"]
    base = [row for row in stock["alone"] if row["name"] is None]
    return {
        "graft against stock": compare(stock["alone"], graft["alone"]),
        "graft against stock, prefix hits": compare(stock["alone"], graft["again"]),
        "graft against stock, at once": compare(stock["alone"], graft["at once"]),
        "stock against itself, prefix hits": compare(stock["alone"], stock["again"]),
        "stock against itself, at once": compare(stock["alone"], stock["at once"]),
        "base against adapters (must differ)": compare(
            base * len(names), [row for row in stock["alone"] if row["name"]]
        ),
        "graft tokens from its prefix cache": sum(row["cached"] for row in graft["again"]),
    }


def main() -> None:
    """Exit 1 when Graft differs from stock by more than stock differs from itself."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, nargs="+", required=True)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--port", type=int, default=32_000)
    for name in ("--server-args", "--stock-args", "--graft-args"):
        parser.add_argument(name, default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = run(options)
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    yardstick = result["stock against itself, at once"]["largest_gap_where_they_part"]
    worst = max(
        value["largest_gap_where_they_part"]
        for name, value in result.items()
        if name.startswith("graft against stock")
    )
    # One step of bf16 at the size of a logit (8 to 16): nothing smaller can be told from a tie.
    sys.exit(worst > max(yardstick, 0.0625) * 2)


if __name__ == "__main__":
    main()
