"""Where the first token of a short prompt spends its time: a server with LoRA off beside Graft.

    python benchmark/serving/bench_path.py --model BASE --adapters DIR --json OUT
        [--server-args="--attention-backend flashinfer --max-total-tokens 100000"]

DIR holds adapter folders, which only Graft loads. Both servers are up at the same time and are
asked in turns, a block of requests each while the other is paused, so that what the machine does
reaches both alike. Requests come one after the other on one open connection: prompts of the base
model that share nothing, one new token. Marks on their way (`path_marks/`) cut the time into parts;
a table has the medians of each, and by how much Graft's is longer.

Parts end at these marks: `received` in the HTTP process, `tokenized` and about to be sent,
`scheduler` has it, `batch` made, `forward` called, `launched` (on a CPU: computed; on a GPU queued,
or replayed); the same three of the decode step that the overlap schedule launches before it looks
at the first result, 0 where it looks first; `result` about to be sent, `detokenizer` has it,
`detokenized`, `answer back` in the HTTP process, and `client` has it. Medians of parts do not add
up to the median of the whole.

What this does not show: the parts of a batch, or of a request that waits; a machine where the
servers' processes compete for cores shows that, too.
"""

import argparse
import bisect
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from sglang_graft.bench.client import request_body
from sglang_graft.bench.figures import spread
from sglang_graft.bench.machine import machine, versions
from sglang_graft.bench.process import HOST, Launched, end, free_port, launch, tail
from sglang_graft.bench.server import healthy
from sglang_graft.bench.shape import ModelShape
from sglang_graft.bench.units import write_json
from sglang_graft.sim.workloads import FIRST_TOKEN

_LAUNCH = ("batch", "forward", "launched")
_NEXT = "next "
PARTS = {
    **{mark: mark for mark in ("received", "tokenized", "scheduler", *_LAUNCH)},
    **{_NEXT + mark: mark for mark in _LAUNCH},
    **{mark: mark for mark in ("result", "detokenizer", "detokenized", "answer back")},
}
"""Parts in the order of a request's way, and the mark at which each ends."""
CLIENT = "client"
SETTLE = 3
"""Requests of each block that are not counted: the server was paused, its caches are cold."""
Marks = list[tuple[float, str]]
Window = tuple[float, float]


def read_marks(folder: Path) -> Marks:
    """All marks of all processes, by time."""
    rows = (line.split("\t") for path in folder.iterdir() for line in path.read_text().splitlines())
    return sorted((float(at), name) for name, at in rows)


def _place(marks: Marks, name: str, place: int) -> int:
    """Where the first mark of this name is from `place` on; behind all of them if there is none."""
    while place < len(marks) and marks[place][1] != name:
        place += 1
    return place


def parts_ms(marks: Marks, windows: list[Window]) -> dict[str, list[float]]:
    """Milliseconds of each part for each request: from the mark before to this one.

    A window is from when the client sent a request until it had the answer. The first mark of each
    name behind the one before counts; parts of the next step that end after the result was sent are
    0. ValueError for a request that lacks a mark.
    """
    found: dict[str, list[float]] = {part: [] for part in (*PARTS, CLIENT)}
    for begin, until in windows:
        place, last = bisect.bisect_left(marks, (begin, "")), begin
        for part, mark in PARTS.items():
            at = _place(marks, mark, place)
            if part.startswith(_NEXT) and at > _place(marks, "result", place):
                found[part].append(0.0)
                continue
            if at == len(marks) or marks[at][0] > until:
                raise ValueError(f"no mark {mark!r} for {part!r} between {begin} and {until}")
            found[part].append((marks[at][0] - last) * 1e3)
            last, place = marks[at][0], at + 1
        found[CLIENT].append((until - last) * 1e3)
    return found


def block(client: httpx.Client, prompts: list[list[int]]) -> list[Window]:
    """Requests one after the other; those that settle are left out."""
    windows = []
    for prompt in prompts:
        body = request_body(prompt, None, 1)
        begin = time.perf_counter()
        client.post("/generate", json=body).raise_for_status()
        windows.append((begin, time.perf_counter()))
    return windows[SETTLE:]


def adapters(options: argparse.Namespace) -> list[Path]:
    """Their folders."""
    return sorted(path for path in options.adapters.iterdir() if path.is_dir())


def sizes(options: argparse.Namespace) -> dict[str, int]:
    """Of the model."""
    config = json.loads((options.model / "config.json").read_text())
    return {name: config[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size")}


@contextmanager
def both(options: argparse.Namespace, logs: Path) -> Iterator[dict[str, Any]]:
    """Both servers, paused; by side the server and its client."""
    common = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(options.model)]
    common += shlex.split(options.server_args)
    loras = ["--lora-paths", *(f"{path.name}={path}" for path in adapters(options))]
    sides = {"off": [], "graft": ["--enable-graft", *shlex.split(options.graft_args), *loras]}
    found: dict[str, tuple[Launched, httpx.Client]] = {}
    # A connection is kept while its server is paused.
    env = {**os.environ, "SGLANG_TIMEOUT_KEEP_ALIVE": "3600"}
    limits = httpx.Limits(keepalive_expiry=None)
    try:
        for side, more in sides.items():
            port, log = free_port(), logs / f"{side}.log"
            client = httpx.Client(base_url=f"http://{HOST}:{port}", timeout=600, limits=limits)
            line = [*common, "--host", HOST, "--port", str(port), *more]
            server = Launched(launch(line, log, env))
            found[side] = (server, client)
            while not healthy(f"http://{HOST}:{port}"):
                if server.process.poll() is not None:
                    raise SystemExit(f"{side} did not start:\n{tail(log)}")
                time.sleep(1)
            server.pause()
        yield found
    finally:
        for _, client in found.values():
            client.close()
        end(*(server for server, _ in found.values()))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each part and of the whole, by side."""
    marks = folder / "marks"
    marks.mkdir()
    os.environ["PATH_MARKS"] = str(marks)
    own = [str(Path(__file__).parent / "path_marks"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, own))
    windows: dict[str, list[Window]] = {}
    source = random.Random(0)
    vocabulary = range(FIRST_TOKEN, ModelShape.read(options.model, options.device).vocabulary)
    with both(options, options.logs or folder) as sides:
        for turn in range(options.blocks + 1):
            for side in sorted(sides, reverse=bool(turn % 2)):
                server, client = sides[side]
                server.resume()
                asked = block(
                    client,
                    [
                        source.choices(vocabulary, k=options.prompt)
                        for _ in range(SETTLE + options.requests)
                    ],
                )
                server.pause()
                if turn:  # the first block of each warms up
                    windows.setdefault(side, []).extend(asked)
    taken = read_marks(marks)
    return {
        side: {"whole": [(until - begin) * 1e3 for begin, until in of], **parts_ms(taken, of)}
        for side, of in windows.items()
    }


def _quickest(values: list[float]) -> float:
    """The 20 % quantile: on a host with neighbours a process may run at two speeds."""
    return statistics.quantiles(values, n=5, method="inclusive")[0]


def table(parts: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: medians and 20 % quantiles in milliseconds."""
    lines = ["| part | LoRA off | Graft | more | off, p20 | Graft, p20 | more |", "|---" * 7 + "|"]
    for part in ("whole", *PARTS, CLIENT):
        cells = []
        for figure in (statistics.median, _quickest):
            off, graft = (figure(parts[side][part]) for side in ("off", "graft"))
            cells += [f"{off:.3f}", f"{graft:.3f}", f"{graft - off:+.3f}"]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, keep, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--blocks", type=int, default=16, help="of each side")
    parser.add_argument("--requests", type=int, default=20, help="of a block")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--commit", default="", help="where the tree has no history")
    for name in ("--server-args", "--graft-args"):
        parser.add_argument(name, default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parts = measure(options, Path(folder))
    result = {
        "what": "parts of first tokens, one request at a time, ms",
        "model": sizes(options),
        "adapters": len(adapters(options)),
        "prompt": options.prompt,
        "blocks": options.blocks,
        "server_args": options.server_args,
        "graft_args": options.graft_args,
        "machine": machine(options.device),
        "versions": versions(options.device, options.commit or None),
        "requests": len(parts["off"]["whole"]),
        "ms": {
            side: {part: spread(values, 1.0) for part, values in of.items()}
            for side, of in parts.items()
        },
    }
    write_json(options.json, result)
    print(table(parts))


if __name__ == "__main__":
    main()
