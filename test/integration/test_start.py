"""What keeps a server from starting: refused flags, and hooks that are not live."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import running, tail

from sglang_graft.engine import refusals

pytestmark = pytest.mark.server

SCRIPT = Path(__file__).with_name("start_script.py")
# One refused value for each row of the table; () for a switch. `enable_lora` has no flag that
# turns it off.
VALUES: dict[str, tuple[str, ...]] = {
    "lora_backend": ("triton",),
    "radix_cache_backend": ("other",),
    "tp_size": ("2",),
    "pp_size": ("2",),
    "dp_size": ("2",),
    "dcp_size": ("2",),
    "page_size": ("8",),
    "speculative_algorithm": ("EAGLE",),
    "disaggregation_mode": ("prefill",),
    "enable_hierarchical_cache": (),
    "enable_hisparse": (),
    "enable_lmcache": (),
    "enable_flexkv": (),
    "enable_unified_memory": (),
    "enable_page_major_kv_layout": (),
    "prefill_only_disable_kv_cache": (),
    "enable_memory_saver": (),
    "enable_lora_overlap_loading": (),
    "lora_eviction_policy": ("fifo",),
    "max_loaded_loras": ("8",),
    "enable_streaming_session": (),
    "enable_session_radix_cache": (),
    "strip_thinking_cache": (),
    "kv_events_config": ("{}",),
    "kv_canary": ("log",),
    "dllm_algorithm": ("LowConfidence",),
    "enable_two_batch_overlap": (),
    "enable_mixed_chunk": (),
    "enable_pdmux": (),
    "elastic_ep_backend": ("mooncake",),
    "schedule_policy": ("dfs-weight",),
    "cuda_graph_backend_decode": ("breakable",),
    "cuda_graph_backend_prefill": ("full",),
    "cuda_graph_config": ('{"decode": {"backend": "breakable"}}',),
    "debug_cuda_graph": (),
    "enable_torch_compile": (),
    "tokenizer_worker_num": ("2",),
    "grpc_port": ("40000",),
    "kv_cache_dtype": ("fp4_e2m1",),
    "attention_backend": ("flex_attention",),
    "prefill_attention_backend": ("flex_attention",),
    "decode_attention_backend": ("flex_attention",),
}
TABLE = {row.field: row for row in (*refusals.REQUESTED, *refusals.RESOLVED)}

PLUGIN = """
from sglang.srt.managers.schedule_policy import PrefillAdder

def break_it():
    PrefillAdder.add_one_req = lambda self, req: None
"""


@pytest.fixture(scope="module")
def outcome(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script found: every case in one process, because imports are slow."""
    cases = [[TABLE[field].flag, *values] for field, values in VALUES.items()]
    log = tmp_path_factory.mktemp("start") / "script.log"
    line = [sys.executable, str(SCRIPT), str(base_model), json.dumps(cases)]
    with running(line, log) as process:
        assert process.wait() == 0, tail(log)
    found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
    found["errors"] = dict(zip(VALUES, found["errors"], strict=True))
    return found


def test_every_row_of_the_table_has_a_case() -> None:
    assert VALUES.keys() == TABLE.keys() - {"enable_lora"}


@pytest.mark.parametrize("field", VALUES)
def test_a_refused_flag_is_named_with_the_reason(outcome: dict[str, Any], field: str) -> None:
    error = outcome["errors"][field]
    assert f"--enable-graft cannot be combined with {TABLE[field].flag} " in error
    assert TABLE[field].reason in error


def test_without_the_flag_only_flags_are_hooked(outcome: dict[str, Any]) -> None:
    plain = outcome["plain"]
    assert plain["hooks"] == [
        "sglang.srt.server_args.ServerArgs.__post_init__",
        "sglang.srt.server_args.ServerArgs.add_cli_args",
    ]
    assert plain["changed"] == {}
    assert "sglang_graft.engine.scheduler" not in plain["modules"]
    assert "sglang_graft.serving.install" not in plain["modules"]


def test_a_hook_whose_target_has_changed_keeps_the_server_from_starting(
    base_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "breaking_plugin.py").write_text(PLUGIN)
    facts = tmp_path / "breaking_plugin-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: breaking-plugin\nVersion: 1.0\n")
    entry = "[sglang.srt.plugins]\nbreaking = breaking_plugin:break_it\n"
    (facts / "entry_points.txt").write_text(entry)
    log = tmp_path / "server.log"
    line = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(base_model)]
    line += ["--enable-graft", "--max-total-tokens", "4096"]
    with running(line, log, {"PYTHONPATH": str(tmp_path)}) as process:
        assert process.wait() != 0
    text = log.read_text()
    assert "Graft refuses to start" in text
    assert "PrefillAdder.add_one_req: wanted parameters" in text
