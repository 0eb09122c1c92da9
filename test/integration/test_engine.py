"""`sglang.Engine` with Graft on, and a server that has Graft installed but not switched on."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from harness import Request, running, serve, tail
from reference import Reference, check, difference

pytestmark = pytest.mark.server

SCRIPT = Path(__file__).with_name("engine_script.py")
NAMES = ("all-r16", "patterns")
REQUESTS = [
    Request(name, tiny_model.prompt(length, seed=length))
    for length in (40, 150)
    for name in (None, *NAMES)
]
ENGINES: list[dict[str, Any]] = [
    {"max_total_tokens": 8192},
    {"max_total_tokens": 8192, "enable_lora": True, "max_lora_rank": 16, "page_size": 16},
]


def test_engine(
    base_model: Path, adapters: dict[str, Path], reference: Reference, tmp_path: Path
) -> None:
    given = {
        "model": str(base_model),
        "adapters": {name: str(adapters[name]) for name in NAMES},
        "engines": ENGINES,
        "requests": [request.body() for request in REQUESTS],
    }
    log = tmp_path / "engine.log"
    line = [sys.executable, str(SCRIPT), json.dumps(given)]
    with running(line, log, {"GRAFT_ENABLE": "1", "GRAFT_CHECK": "1"}) as process:
        assert process.wait() == 0, tail(log)
    results = json.loads(log.read_text().splitlines()[-1])
    assert len(results) == len(ENGINES)
    for result in results:
        assert result["graft"]
        assert "all-r16, patterns" in result["unknown"]
        for request, tokens in zip(REQUESTS, result["tokens"], strict=True):
            wanted = reference.answer(request.adapter, request.prompt, request.new_tokens)
            assert difference(tokens, wanted) is None


def test_a_server_without_graft(base_model: Path, reference: Reference, tmp_path: Path) -> None:
    request = Request(None, tiny_model.prompt(150, seed=150))
    with serve(base_model, tmp_path, "--max-total-tokens", "8192", graft=False) as server:
        check(reference, [request], [server.ask(request)])
        assert server.get("/graft/pool").status_code == 404
        info = server.get("/server_info").json()
        assert info["radix_cache_backend"] is None
        assert not info["enable_lora"]
        assert info["page_size"] == 1
        assert all("graft" not in state for state in info["internal_states"])
        log = server.log.read_text()
    assert "impl=RadixCache" in log
    assert "Graft is on" not in log
