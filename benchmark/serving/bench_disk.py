"""First tokens of adapters that have to come from disk: on an idle server, and beside a stream.

    graft bench model tiny-deep --out MODEL
    python benchmark/serving/bench_disk.py --model MODEL --json OUT --work-dir DIR --device cpu

One Graft server whose pool holds two adapters and whose host memory three. Requests go to all of
them in turn, one at a time, so each finds its adapter neither on the device nor on the host; the
server's own count of reads is in the result. Then the same beside one long answer of the base
model. Reads are of files that were just written: the page cache has them, so what is timed is what
the server does, not the disk.

What this does not show: a disk; several readers at once; traffic.
"""

import argparse
import json
import shlex
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from sglang_graft.bench.budget import split
from sglang_graft.bench.client import request_body
from sglang_graft.bench.machine import machine, versions
from sglang_graft.bench.make_adapters import make_adapters
from sglang_graft.bench.peers import parse_peers
from sglang_graft.bench.server import ServerError, Settings, Start, serving
from sglang_graft.bench.shape import ModelShape
from sglang_graft.bench.units import write_json
from sglang_graft.sim.workloads import FIRST_TOKEN, AdapterSpec, Request, Segment, Workload

ADAPTERS, ON_DEVICE, ON_HOST = 8, 2.5, 3.5
PROMPT, TURNS = 20, 3


def ask(client: httpx.Client, name: str | None, new_tokens: int) -> float:
    """Seconds that one request takes."""
    body = request_body([FIRST_TOKEN + i for i in range(PROMPT)], name, new_tokens)
    start = time.perf_counter()
    client.post("/generate", json=body).raise_for_status()
    return time.perf_counter() - start


def disk_reads(client: httpx.Client) -> int:
    found: int = client.get("/graft/pool").json()["host"]["disk_reads"]
    return found


def phase(url: str, names: list[str]) -> dict[str, Any]:
    """Every adapter in turn, one request at a time."""
    with httpx.Client(base_url=url, timeout=600) as client:
        before = disk_reads(client)
        seconds = [ask(client, name, 1) for _ in range(TURNS) for name in names]
        return {
            "requests": len(seconds),
            "disk_reads": disk_reads(client) - before,
            "median_s": statistics.median(seconds),
            "max_s": max(seconds),
            "seconds": seconds,
        }


def beside_a_stream(url: str, names: list[str]) -> dict[str, Any]:
    """The same while the base model answers one request after the other."""
    over = threading.Event()

    def stream() -> None:
        with httpx.Client(base_url=url, timeout=600) as client:
            while not over.is_set():
                ask(client, None, 128)

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        return phase(url, names)
    finally:
        over.set()
        thread.join()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Adapters, a server, both phases."""
    shape = ModelShape.read(options.model, options.device)
    specs = tuple(AdapterSpec(f"adapter-{i}", options.rank) for i in range(ADAPTERS))
    folders = make_adapters(options.work_dir / "adapters", specs, shape, seed=0)
    request = Request(0, (Segment(0, PROMPT),), Segment(1, 1))
    workload = Workload("disk", 0, specs, (request,))
    size = shape.adapter_bytes_per_rank * options.rank
    (peer,) = parse_peers(["graft:cost"])
    cut = split(peer, ON_DEVICE * size / 1e9, shape, workload)
    host = ["--graft-host-memory-gb", str(ON_HOST * size / 1e9)]
    more = {"all": shlex.split(options.server_args), "graft": host}
    settings = Settings(
        model=options.model.resolve(), shape=shape, device=options.device, more=more
    )
    start = Start(peer, cut, folders, options.work_dir / "disk.log")
    with serving([start], settings) as (server,):
        if isinstance(server, ServerError):
            raise server
        ask(httpx.Client(base_url=server.url, timeout=600), None, 1)
        return {
            "what": "first tokens of adapters that come from disk, one request at a time",
            "machine": machine(options.device),
            "versions": versions(options.device, options.commit or None),
            "adapter_bytes": size,
            "idle": phase(server.url, [spec.name for spec in specs]),
            "beside a stream": beside_a_stream(server.url, [spec.name for spec in specs]),
        }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, required=True, help="adapters, log")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--commit", default="", help="where the tree has no history")
    parser.add_argument("--server-args", default="")
    options = parser.parse_args()
    result = measure(options)
    write_json(options.json, result)
    print(json.dumps({k: v for k, v in result.items() if k != "versions"}, indent=1))


if __name__ == "__main__":
    main()
