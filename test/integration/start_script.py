"""Parses many command lines in one process, as a server's main process does at its start.

In:  the model's folder, then a JSON list of lists of flags.
Out: as last line of JSON: {"plain": what a start without Graft left behind, "errors": [text, ...]}
"""

import json
import sys

from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs, prepare_server_args


def plain(model: str) -> dict[str, object]:
    """Parse a command line without `--enable-graft`; must be the process's first."""
    args = prepare_server_args(["--model-path", model])
    fields = ("enable_lora", "lora_backend", "radix_cache_backend", "max_loras_per_batch")
    fields += ("max_lora_rank", "lora_target_modules", "page_size")
    return {
        "hooks": sorted(HookRegistry._hooks),
        "modules": sorted(name for name in sys.modules if name.startswith("sglang_graft.")),
        "changed": {
            name: getattr(args, name)
            for name in fields
            if getattr(args, name) not in (getattr(ServerArgs, name), 1)
        },
    }


def error(model: str, flags: list[str]) -> str:
    """What a start with Graft and `flags` says, "" where it is content."""
    try:
        prepare_server_args(["--model-path", model, "--enable-graft", *flags])
    except (Exception, SystemExit) as found:  # noqa: BLE001 - whatever it is, it is the result
        return f"{type(found).__name__}: {found}"
    return ""


if __name__ == "__main__":
    model, cases = sys.argv[1], json.loads(sys.argv[2])
    load_plugins()
    result = {"plain": plain(model), "errors": [error(model, flags) for flags in cases]}
    print(json.dumps(result))
