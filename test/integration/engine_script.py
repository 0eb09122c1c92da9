"""Runs `sglang.Engine` in a process of its own: JSON in as the argument, JSON out as last line.

In:  {"model", "adapters": {name: folder}, "engines": [keyword arguments, ...],
      "requests": [{"input_ids", "lora_path", "sampling_params"}, ...]}
Out: for each engine {"tokens": [[...], ...], "graft": bool, "unknown": text of the error}
"""

import json
import sys
from typing import Any

import sglang


def answers(engine: sglang.Engine, requests: list[dict[str, Any]]) -> list[list[int]]:
    """All requests in one call, as a batch."""
    columns = {key: [request[key] for request in requests] for key in requests[0]}
    return [output["output_ids"] for output in engine.generate(**columns)]


def error_of_unknown(engine: sglang.Engine) -> str:
    """What a name that nobody loaded raises."""
    try:
        engine.generate(input_ids=[1, 2], lora_path="nobody")
    except ValueError as error:
        return str(error)
    return ""


def run(given: dict[str, Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Start one engine, ask it everything, stop it."""
    paths = [f"{name}={folder}" for name, folder in given["adapters"].items()]
    engine = sglang.Engine(model_path=given["model"], lora_paths=paths, **keywords)
    try:
        return {
            "tokens": answers(engine, given["requests"]),
            "graft": "graft" in engine.get_server_info()["internal_states"][0],
            "unknown": error_of_unknown(engine),
        }
    finally:
        engine.shutdown()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps([run(given, keywords) for keywords in given["engines"]]))
