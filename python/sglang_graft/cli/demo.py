"""Show Graft at work: `python -m sglang_graft.cli.demo [--keep] [--json] [-- SERVER FLAGS]`.

Starts SGLang's own server with Graft, the small base model and the adapters of `demo/adapters`,
asks each of them the same question twice, and shows the answers and the state of the pool.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from sglang_graft.bench.process import free_port
from sglang_graft.cli.base_model import MODEL_NAME, ensure_base_model
from sglang_graft.cli.demo_client import Answer, ask, pool_state
from sglang_graft.cli.demo_server import ServerError, command, running
from sglang_graft.cli.pool_table import show_pool

ADAPTERS = Path(__file__).resolve().parents[3] / "demo" / "adapters"
MAX_TOKENS = 48
# Longer than a page of tokens, so that asking again finds something in the cache.
QUESTION = (
    "I bought a small used espresso machine last month. In the first week it worked well, but "
    "since Monday the coffee runs slowly, it tastes bitter, and the pump is louder than before. "
    "I wipe the outside every evening, I use fresh beans from the shop around the corner, and "
    "the water comes from the tap. What should I do first, and how do I keep the machine in "
    "good order after that?"
)


def find_adapters(folder: Path) -> dict[str, Path]:
    """Name and folder of each adapter in `folder`, by name; ValueError if there is none."""
    found = {path.parent.name: path.parent for path in folder.glob("*/adapter_config.json")}
    if not found:
        raise ValueError(
            f"wanted adapter folders in {folder}; got none: run from a checkout or set --adapters"
        )
    return dict(sorted(found.items()))


def ask_all(
    client: httpx.Client, names: Sequence[str], *, base: str, question: str, console: Console
) -> tuple[list[Answer], list[Answer]]:
    """Ask base and every adapter, then all of them again: (first answers, second answers)."""
    rounds: list[list[Answer]] = [[], []]
    asked = [(answers, name) for answers in rounds for name in (None, *names)]
    for answers, name in track(asked, description="Asking", console=console):
        answer = ask(client, base=base, adapter=name, question=question, max_tokens=MAX_TOKENS)
        answers.append(answer)
    return rounds[0], rounds[1]


def answer_table(first: Sequence[Answer], again: Sequence[Answer]) -> Table:
    table = Table(title="Same question, asked twice", show_lines=True)
    table.add_column("adapter", style="bold", no_wrap=True)
    table.add_column("answer")
    table.add_column("TTFT", justify="right")
    table.add_column("again", justify="right")
    table.add_column("cached\ntokens", justify="right")
    for cold, warm in zip(first, again, strict=True):
        table.add_row(
            cold.adapter or "(base)",
            escape(cold.text.strip()),
            f"{cold.ttft_ms:.0f} ms",
            f"{warm.ttft_ms:.0f} ms",
            str(warm.cached_tokens),
        )
    return table


def result(first: Sequence[Answer], again: Sequence[Answer], pool: dict[str, Any]) -> str:
    """The JSON line: text and TTFT of the first asking, cached tokens of the second."""
    answers = [
        {**asdict(cold), "cached_tokens": warm.cached_tokens}
        for cold, warm in zip(first, again, strict=True)
    ]
    return json.dumps({"answers": answers, "pool": pool})


def show_calls(url: str, names: Sequence[str], console: Console) -> None:
    """Print how to call the server that is kept."""
    body = json.dumps({"model": names[0], "messages": [{"role": "user", "content": "Hello!"}]})
    console.print(f"\nStill serving; stop it with Ctrl-C. Models: {MODEL_NAME}, {', '.join(names)}")
    lines = (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        f"curl {url}/graft/pool",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def run(options: argparse.Namespace, console: Console) -> None:
    adapters = find_adapters(options.adapters)
    model = ensure_base_model()
    port = options.port or free_port()
    line = command(
        model=model, name=MODEL_NAME, adapters=adapters, port=port, extra=options.server_flags
    )
    names = list(adapters)
    with (
        running(line, port=port, deadline_s=options.start_timeout, console=console) as url,
        httpx.Client(base_url=url) as client,
    ):
        first, again = ask_all(
            client, names, base=MODEL_NAME, question=options.question, console=console
        )
        pool = pool_state(client)
        console.print(answer_table(first, again))
        show_pool(pool, console)
        if options.keep:
            show_calls(url, names, console)
        if options.json:
            sys.stdout.write(result(first, again, pool) + "\n")
            sys.stdout.flush()
        if options.keep:
            signal.pause()  # until Ctrl-C


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--keep", action="store_true", help="keep serving until Ctrl-C")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on the last line"
    )
    parser.add_argument("--question", default=QUESTION, help="what to ask")
    parser.add_argument("--adapters", type=Path, default=ADAPTERS, help="folder of adapter folders")
    parser.add_argument("--port", type=int, default=0, help="port to serve on; default: a free one")
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("server_flags", nargs="*", help="flags for the server, after `--`")
    return parser.parse_args(arguments)


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(143)  # runs the finally blocks, which stop the server


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console()
    signal.signal(signal.SIGTERM, _end)
    try:
        run(options, console)
    except (ServerError, ValueError, httpx.HTTPError) as error:
        console.print(f"[red]demo failed:[/] {escape(str(error))}", highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
