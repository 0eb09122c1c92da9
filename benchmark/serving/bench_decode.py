"""What LoRA costs a decode step, a first token and a start, against a server with LoRA off.

    python benchmark/serving/bench_decode.py --model BASE --adapters DIR --json OUT \
        [--sides off graft] [--server-args="--attention-backend flashinfer"]

DIR holds adapter folders; names that end in `-rN` say the rank. Sides, one after the other in one
run: `off` (stock SGLang without LoRA), `graft`, `stock` (stock with csgmv). OUT is kept up to date,
and sides that it holds are not run again.

Decode step: 64 requests in one call, 128 prompt tokens each; (time for 256 new tokens - time for
32) / 224, so that prefill and HTTP cancel. First token: one request at a time, 256 prompt tokens,
one new token, on one open connection (a new HTTP client loads certificates for tens of
milliseconds); base, warm and cold adapters take turns, so that what the machine does meanwhile
reaches all of them alike; `inside` is the part that the server counts, from the request's arrival
in its HTTP process to the answer's. Medians over the repeats. Also greedy answers, alone and all at
once, which tell whether graphs, the overlap schedule or the batch change tokens (compare the files
of two runs with different `--graft-args`).

What this does not show: arrivals, queueing, prefix reuse; the model is random, so no text.
"""

import argparse
import json
import random
import shlex
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from gate_tokens import answer, ask_all, serve, stop

BATCH, PROMPT, VOCABULARY = 64, 128, 128_000
SHORT, LONG = 32, 256
COLD, TURNS = 16, 40
"""First tokens: how many adapters are asked cold, and how often the others are asked."""
INSIDE = ", inside"
Names = list[str | None]


def cases(names: list[str]) -> dict[str, Names]:
    """The adapters of a batch of 64, by what the case is called."""
    by_rank: dict[int, list[str]] = {}
    for name in sorted(names):
        by_rank.setdefault(int(name.rsplit("-r", 1)[1]), []).append(name)
    few = sorted(by_rank)[0]
    found: dict[str, list[str]] = {
        f"{count} adapters r{few}": by_rank[few][:count] for count in (1, 8, 32)
    }
    found |= {f"8 adapters r{rank}": by_rank[rank][:8] for rank in by_rank if rank != few}
    if len(by_rank) > 1:
        found["mixed ranks"] = [name for rank in by_rank for name in by_rank[rank][:4]]
    spread: dict[str, Names] = {
        case: [chosen[i % len(chosen)] for i in range(BATCH)] for case, chosen in found.items()
    }
    half: Names = [found[f"1 adapters r{few}"][0], None]
    return {"base": [None] * BATCH, **spread, "half base": half * (BATCH // 2)}


def generate(
    client: httpx.Client, prompts: list[list[int]], names: Names, tokens: int
) -> tuple[float, float]:
    """Seconds that one call takes, and those of its slowest request by the server's own count."""
    body: dict[str, Any] = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    if any(names):
        body["lora_path"] = names
    start = time.perf_counter()
    reply = client.post("/generate", json=body)
    seconds = time.perf_counter() - start
    reply.raise_for_status()
    rows = reply.json()
    got = [len(row["output_ids"]) for row in rows]
    assert got == [tokens] * len(prompts), got
    return seconds, max(row["meta_info"]["e2e_latency"] for row in rows)


def prompts_for(source: random.Random, count: int, length: int) -> list[list[int]]:
    """Prompts that share nothing, so that none is found in the prefix cache."""
    return [[source.randrange(10, VOCABULARY) for _ in range(length)] for _ in range(count)]


def step_ms(client: httpx.Client, names: Names, source: random.Random, repeats: int) -> list[float]:
    """Milliseconds of a decode step, for each repeat."""
    generate(client, prompts_for(source, BATCH, PROMPT), names, SHORT)
    steps = []
    for _ in range(repeats):
        short, long = (
            generate(client, prompts_for(source, BATCH, PROMPT), names, n)[0] for n in (SHORT, LONG)
        )
        steps.append((long - short) / (LONG - SHORT) * 1e3)
    return steps


def first_token_ms(
    client: httpx.Client, asked: Mapping[str, Names], source: random.Random, length: int
) -> dict[str, list[float]]:
    """Milliseconds to the first token of one request after the other, by case; cases take turns
    as long as they have names left."""
    times: dict[str, list[float]] = {case + of: [] for case in asked for of in ("", INSIDE)}
    for turn in range(max(len(names) for names in asked.values())):
        for case, names in asked.items():
            if turn < len(names):
                prompts = prompts_for(source, 1, length)
                seconds, inside = generate(client, prompts, [names[turn]], 1)
                times[case].append(seconds * 1e3)
                times[case + INSIDE].append(inside * 1e3)
    return times


def first_tokens(
    client: httpx.Client, names: list[str], source: random.Random
) -> dict[str, list[float]]:
    """Of 256 tokens with cold adapters among them, then of longer prompts."""
    few = [name for name in sorted(names) if name.endswith("-r16")] or sorted(names)
    always: dict[str, Names] = {"base": [None]}
    if names:
        always["warm adapter"] = [*few[:1]]
    first_token_ms(client, {case: 10 * asks for case, asks in always.items()}, source, 256)
    asked = {case: TURNS * asks for case, asks in always.items()}
    if few[1:]:  # nothing has used them yet: the first request of each finds its weights cold
        asked["cold adapter"] = [*few[1 : COLD + 1]]
    found = first_token_ms(client, asked, source, 256)
    for length in (1024, 4096, 8000):
        times = first_token_ms(client, {c: 6 * asks for c, asks in always.items()}, source, length)
        found |= {f"{case}, {length} tokens": values[1:] for case, values in times.items()}
    return found


def measure(port: int, names: list[str], repeats: int) -> dict[str, Any]:
    """All figures of one side; `names` is empty where LoRA is off."""
    source = random.Random(0)
    chosen = cases(names) if names else {"base": [None] * BATCH}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
        first = first_tokens(client, names, source)
        steps = {case: step_ms(client, of, source, repeats) for case, of in chosen.items()}
    return {"step_ms": steps, "first_token_ms": first}


def run_side(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start a server, take its figures, end it."""
    folders = sorted(path for path in options.adapters.iterdir() if path.is_dir())
    arguments = ["--model-path", str(options.model), *shlex.split(options.server_args)]
    loras = ["--lora-paths", *(f"{path.name}={path}" for path in folders)]
    arguments += {
        "off": [],
        "graft": ["--enable-graft", *shlex.split(options.graft_args), *loras],
        "stock": ["--lora-backend", "csgmv", *shlex.split(options.stock_args), *loras],
    }[side]
    names = [path.name for path in folders] if side != "off" else []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(options.logs or folder, f"{side}.log")
        start = time.monotonic()
        process = serve(options.port, arguments, log)
        result: dict[str, Any] = {"start_seconds": time.monotonic() - start}
        try:
            if not options.answers_only:
                result |= measure(options.port, names, options.repeats)
            if names:
                result["answers"] = ask_all(options.port, names[:2], VOCABULARY, 24)
            else:
                answer(options.port, None, prompts_for(random.Random(1), 1, 64)[0], 8)
        finally:
            stop(process)
    return result


def table(results: dict[str, Any]) -> str:
    """Markdown: steps and first tokens of every side, over those with LoRA off."""
    lines = []
    off = results.get("off", {})
    for kind in ("step_ms", "first_token_ms"):
        lines += [
            f"| {kind} | side | median | p20 | p80 | over LoRA off |",
            "|---|---|---|---|---|---|",
        ]
        for side, result in results.items():
            for case, values in result.get(kind, {}).items():
                suffix = case[case.index(",") :] if "," in case else ""
                base = off.get(kind, {}).get(f"base{suffix}")
                middle = statistics.median(values)
                low, high = (statistics.quantiles(values, n=5)[i] for i in (0, 3))
                over = f"{middle / statistics.median(base):.3f}x" if base else ""
                lines.append(
                    f"| {case} | {side} | {middle:.2f} | {low:.2f} | {high:.2f} | {over} |"
                )
        lines.append("")
    starts = {side: round(result["start_seconds"], 1) for side, result in results.items()}
    return "\n".join([*lines, f"start, seconds: {starts}"])


def main() -> None:
    """Run the sides that the JSON file lacks, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--sides", nargs="+", default=["off", "graft"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=32_000)
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--answers-only", action="store_true")
    for name in ("--server-args", "--stock-args", "--graft-args"):
        parser.add_argument(name, default="")
    options = parser.parse_args()
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    for side in options.sides:
        if side not in results:
            results[side] = run_side(side, options)
            options.json.write_text(json.dumps(results, indent=1) + "\n")
            print(side, "done", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
